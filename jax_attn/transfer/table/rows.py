"""A table's rows: torch keys, Flax paths, and the steps between them."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jax_attn.transfer.table.steps import Arrays, MisfitError, Shapes, Sizes, Step

_HOLE = re.compile(r"\{(\w+)\}")

T = TypeVar("T")

Binding = tuple[tuple[str, str], ...]
"""Names in braces with the integers that they represent: (("layer", "3"),)."""


@dataclass(frozen=True, repr=False)
class Row:
    """A pair of torch keys and Flax paths, equal up to `steps`. Made by `row`.

    is_optional: whether modules may lack the whole row.
    """

    keys: tuple[str, ...]
    paths: tuple[str, ...]
    steps: tuple[Step, ...]
    is_optional: bool = field(default=False, compare=False)

    def __repr__(self) -> str:
        arguments = (_quoted(self.keys), _quoted(self.paths), *map(repr, self.steps))
        return f"row({', '.join(arguments)})"

    @property
    def effect(self) -> str:
        """Names of the steps, or "=" for the same array."""
        return " ".join(step.name for step in self.steps) or "="

    def at(self, binding: Binding) -> "Row":
        """Return the row with the names in braces replaced by integers."""
        return Row(filled(self.keys, binding), filled(self.paths, binding), self.steps)

    def key_shapes(self, path_shapes: Shapes) -> Shapes:
        """Return the torch shapes for Flax arrays of `path_shapes`. Raises MisfitError."""
        return self._shapes(path_shapes)[0]

    def fits(self, path_shapes: Shapes) -> Shapes | None:
        """Return `key_shapes`, or None if the steps do not allow `path_shapes`."""
        try:
            return self.key_shapes(path_shapes)
        except MisfitError:
            return None

    def path_shapes(self, key_shapes: Shapes, sizes: Sizes) -> Shapes:
        """Return the shapes of Flax arrays from tensors of `key_shapes`. Raises MisfitError."""
        for step in self.steps:
            key_shapes = _called(step, step.target, key_shapes, len(self.paths), sizes)
        if (count := len(key_shapes)) != len(self.paths):
            raise MisfitError(f"{self.effect} gives {count} arrays, got {len(self.paths)} paths")
        return key_shapes

    def to_flax(self, tensors: Arrays, path_shapes: Shapes) -> Arrays:
        """Convert torch tensors, one per key, to Flax arrays, one per path; views if possible."""
        shapes = self._shapes(path_shapes)
        key_shapes = tuple(tensor.shape for tensor in tensors)
        if key_shapes != shapes[0]:
            raise MisfitError(f"expected {[*shapes[0]]}, got {[*key_shapes]}")
        for step, behind in zip(self.steps, shapes[1:], strict=True):
            tensors = _called(step, step.forward, tensors, behind)
        return tensors

    def to_torch(self, arrays: Arrays) -> Arrays:
        """Convert Flax arrays, one per path, to torch tensors, one per key; views if possible."""
        shapes = self._shapes(tuple(array.shape for array in arrays))
        for step, before in zip(reversed(self.steps), reversed(shapes[:-1]), strict=True):
            arrays = _called(step, step.backward, arrays, before)
        return arrays

    def _shapes(self, path_shapes: Shapes) -> list[Shapes]:
        shapes = [path_shapes]
        for step in reversed(self.steps):
            shapes.insert(0, _called(step, step.source, shapes[0], len(self.keys)))
        return shapes


@dataclass(frozen=True)
class Either:
    """Alternatives, each a tuple of rows. Made by `either`."""

    alternatives: tuple[tuple[Row, ...], ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """Rows of all alternatives."""
        return tuple(r for alternative in self.alternatives for r in alternative)


@dataclass(frozen=True)
class Refused:
    """A torch key that is always an error, and why. Made by `refused`."""

    key: str
    reason: str


@dataclass(frozen=True)
class Ignored:
    """A torch key that is passed over, and why. Made by `ignored` and `tied`.

    same_as: the key whose tensor it must repeat, bit for bit; '' if there is none.
    """

    key: str
    reason: str
    same_as: str = ""


@dataclass(frozen=True, init=False)
class Table:
    """The rows of a table, in groups of alternatives, and the keys that it refuses or passes over.

    `Layout` makes one.
    """

    groups: tuple[Either, ...]
    refusals: tuple[Refused, ...]
    passed_over: tuple[Ignored, ...]


def row(keys: str | Sequence[str], paths: str | Sequence[str], *steps: Step) -> Row:
    """Pair torch keys with Flax paths through steps, read from torch to Flax.

    Args:
      keys: one torch key or several. `{layer}`, or any other name in braces, represents an integer.
      paths: one Flax path or several, with the same names in braces. Several paths need a step
        that splits, such as `packed`; several keys need one that joins, such as `joined`.
      steps: the steps; without any, the array is unchanged.

    Raises:
      ValueError: the row cannot be inverted.
    """
    pairing = Row(_names("keys", keys), _names("paths", paths), steps)
    if others := [step for step in steps if not isinstance(step, Step)]:
        raise TypeError(f"{pairing!r}: expected steps, got {others}")
    needed = ["split"] * (len(pairing.paths) > 1) + ["join"] * (len(pairing.keys) > 1)
    if len(needed) > 1:
        raise ValueError(f"{pairing!r}: several keys and several paths; write one row for each")
    fans = [step.fan for step in steps if step.fan != "each"]
    joins_one = fans == ["join"] and not needed  # such as a stack of one expert
    if fans != needed and not joins_one:
        raise ValueError(
            f"{pairing!r}: {len(pairing.keys)} key(s) to {len(pairing.paths)} path(s) need "
            f"{needed or 'no'} step, got {fans or 'none'}"
        )
    if len({frozenset(_HOLE.findall(name)) for name in (*pairing.keys, *pairing.paths)}) > 1:
        raise ValueError(f"{pairing!r}: every key and path needs the same names in braces")
    return pairing


def either(*alternatives: Row | Sequence[Row]) -> Either:
    """Combine alternative rows, of which one applies, such as packed or split projections.

    Loading takes the alternative whose keys are present. Exporting takes the first whose shapes
    fit.
    """
    group = Either(tuple((a,) if isinstance(a, Row) else tuple(a) for a in alternatives))
    if len({holes(r) for r in group.rows}) > 1:
        raise ValueError(f"either: every row needs the same names in braces, got {[*group.rows]}")
    owners = [key for a in group.alternatives for key in {key for r in a for key in r.keys}]
    if shared := sorted(key for key, count in Counter(owners).items() if count > 1):
        raise ValueError(f"either: a key in two alternatives cannot tell them apart: {shared}")
    return group


def refused(key: str, reason: str) -> Refused:
    """Declare a torch key that Flax has no place for: its presence is an error with `reason`."""
    return Refused(key, reason)


def ignored(key: str, reason: str) -> Ignored:
    """Declare a torch key that is passed over, such as a buffer computed in Flax."""
    return Ignored(key, reason)


def tied(key: str, same_as: str) -> Ignored:
    """Declare a torch key that repeats `same_as`; only `same_as` is read and exported.

    A file that lacks `same_as` is read by `key`.
    """
    return Ignored(key, f"tied to {same_as}", same_as)


def holes(pattern: Row) -> frozenset[str]:
    """Return the names in braces."""
    return frozenset(_HOLE.findall(pattern.keys[0]))


def bindings(patterns: Iterable[str], names: Iterable[str]) -> set[Binding]:
    """Return the values of the names in braces with which a pattern becomes one of `names`."""
    names = list(names)
    return {
        tuple(sorted(match.groupdict().items()))
        for pattern in patterns
        for match in map(regex(pattern).fullmatch, names)
        if match
    }


def regex(pattern: str) -> re.Pattern[str]:
    """Return `layers.{layer}.weight` as a regular expression with a group `layer`."""
    parts = _HOLE.split(pattern)
    names, texts = parts[1::2], map(re.escape, parts[::2])
    groups = [
        # No leading zeros, or "07" would be written back as "7".
        f"(?P={name})" if name in names[:i] else f"(?P<{name}>0|[1-9][0-9]{{0,8}})"
        for i, name in enumerate(names)
    ]
    return re.compile("".join(map(str.__add__, texts, [*groups, ""])))


def filled(names: tuple[str, ...], binding: Binding) -> tuple[str, ...]:
    """Return the patterns with their names in braces replaced by integers."""
    values = dict(binding)
    return tuple(_HOLE.sub(lambda m: values[m[1]], name) for name in names)


def _called(step: Step, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function of the step; convert any error, as of user-defined steps, to MisfitError."""
    try:
        return function(*arguments)
    except MisfitError:
        raise
    except Exception as error:
        raise MisfitError(f"step {step} raised {type(error).__name__}: {error}") from error


def _names(argument: str, names: str | Sequence[str]) -> tuple[str, ...]:
    is_several = isinstance(names, Sequence) and not isinstance(names, str)
    several: tuple[Any, ...] = tuple(names) if is_several else (names,)
    if not several or not all(isinstance(name, str) and name for name in several):
        raise ValueError(f"{argument}: expected one name or several, got {names!r}")
    if len(set(several)) != len(several):
        raise ValueError(f"{argument}: expected each name once, got {names!r}")
    return several


def _quoted(names: tuple[str, ...]) -> str:
    quoted = ", ".join(f'"{name}"' for name in names)
    return quoted if len(names) == 1 else f"({quoted})"
