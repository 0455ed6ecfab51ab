"""Tensors under other keys: a prefix stripped, or the names of wrappers recognised."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from jax_attn.transfer.arrays import LazyMapping, Spec, Tensors, describe, read
from jax_attn.transfer.problems import Problem, nearest
from jax_attn.transfer.table.reasons import WRAPPERS

T = TypeVar("T", bound=Mapping[str, Any])

_ROOT = "module"
"""A wrapper's name that models use for parts of their own, too."""


class Renamed(LazyMapping[Any]):
    """A mapping under other keys, as lazy as the original. keys: new to old."""

    def __init__(self, tensors: Tensors, keys: Mapping[str, str]) -> None:
        super().__init__(keys)
        self._tensors, self._keys = tensors, dict(keys)
        self.path = getattr(tensors, "path", None)

    def __getitem__(self, key: str) -> Any:
        return self._tensors[self._keys[key]]

    def describe(self, key: str) -> Spec:
        """Return shape and dtype name of one tensor, without reading it if that is possible."""
        lazy = getattr(self._tensors, "describe", None)
        return lazy(self._keys[key]) if lazy else describe(self[key])

    def tied(self) -> dict[str, str]:
        """Map each key whose tensor occupies another key's memory to that other key."""
        names = {old: new for new, old in self._keys.items()}
        ties: Mapping[str, str] = getattr(self._tensors, "tied", dict)()
        return {names[key]: names[same] for key, same in ties.items()}

    def mapped(self, key: str) -> Any:
        """Return one tensor for immediate use, uncopied if that is possible."""
        return read(self._tensors, self._keys[key])


def stripped(tensors: T, prefix: str) -> tuple["T | Renamed", list[Problem]]:
    """Remove `prefix` from the keys that begin with it; return the same tensors and the problems.

    prefix: with or without the trailing dot; "" for none. Names of wrappers are removed in any
    order, and from anywhere in a key.
    """
    if not prefix:
        return tensors, []
    dotted = f"{prefix.removesuffix('.')}."
    wrappers = dotted.split(".")[:-1]
    if WRAPPERS.keys() >= {*wrappers}:
        names = [_bare(key, wrappers) for key in tensors]
    else:
        names = [key.removeprefix(dotted) for key in tensors]
    if names == list(tensors):
        firsts = {f"{key.partition('.')[0]}." for key in tensors}
        text = "expected keys that begin with this prefix, but there are none"
        return tensors, [Problem("missing", dotted, text, nearest(dotted, firsts))]
    keys: dict[str, list[str]] = {}
    for name, key in zip(names, tensors, strict=True):
        keys.setdefault(name, []).append(key)
    problems = [
        Problem("doubly written", name, f"{' and '.join(map(repr, alike))} all become {name!r}")
        for name, alike in keys.items()
        if len(alike) > 1
    ]
    return Renamed(tensors, dict(zip(names, tensors, strict=True))), problems


def unwrapped(tensors: T, known: Iterable[str] = ()) -> tuple["T | Renamed", list[Problem]]:
    """Remove the names of wrappers; return the same tensors, and a problem if there were any.

    It is a problem because the caller did not ask for it. known: patterns of a table's keys; a
    wrapper's name that one of them has belongs to the table.
    """
    patterns = [pattern.split(".") for pattern in known]
    inside = {part for _, *rest in patterns for part in rest if part != _ROOT}
    own = inside | {first for first, *_ in patterns}
    wrappers = [wrapper for wrapper in WRAPPERS if wrapper not in own]
    names = {key: _bare(key, wrappers) for key in tensors}
    changed = [key for key, name in names.items() if key != name]
    if not changed:
        return tensors, []
    removed = Counter(part for key in changed for part in key.split("."))
    removed -= Counter(part for key in changed for part in names[key].split("."))
    prefix = "".join(f"{wrapper}." for wrapper in removed)
    authors = " and ".join(WRAPPERS[wrapper] for wrapper in removed)
    text = f"{authors} added this to {len(changed)} of {len(names)} keys"
    hint = f"strip it: jax-attn port IN OUT --to flax --strip {prefix}; models.load reads OUT"
    view = Renamed(tensors, {name: key for key, name in names.items()})
    return view, [Problem("unexpected", prefix, text, hint)]


def _bare(key: str, wrappers: Collection[str]) -> str:
    """Return a key without the names of these wrappers.

    "module" is one only where a key begins, as often as it is among them. The last part of a key
    names a tensor.
    """
    *parts, last = key.split(".")
    parts = [part for part in parts if part == _ROOT or part not in wrappers]
    for _ in range([*wrappers].count(_ROOT)):
        parts = parts[1:] if parts[:1] == [_ROOT] else parts
    return ".".join((*parts, last))
