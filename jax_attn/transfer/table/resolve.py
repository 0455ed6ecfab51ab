"""Match a table with the names and shapes of two sides: the rows that apply, and what is left over.

Pure; `reasons` puts what is left over into words.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from jax_attn.transfer.problems import Problem, TransferError
from jax_attn.transfer.table.rows import (
    Either,
    Ignored,
    Refused,
    Row,
    Table,
    bindings,
    holes,
    regex,
)
from jax_attn.transfer.table.steps import Arrays, MisfitError, Shape, Shapes, Sizes

Names = Mapping[str, Shape]
Rows = tuple[Row, ...]


@dataclass(frozen=True)
class Move:
    """A row that applies, with its shapes on both sides."""

    row: Row
    key_shapes: Shapes
    path_shapes: Shapes

    @property
    def keys(self) -> dict[str, Shape]:
        """Torch keys with their shapes."""
        return dict(zip(self.row.keys, self.key_shapes, strict=True))

    @property
    def paths(self) -> dict[str, Shape]:
        """Flax paths with their shapes."""
        return dict(zip(self.row.paths, self.path_shapes, strict=True))

    def carried(self, to: Literal["flax", "torch"], arrays: Arrays, doing: str) -> Arrays:
        """Convert one side's arrays to the other's; raise TransferError if a step fails."""
        try:
            if to == "flax":
                return self.row.to_flax(arrays, self.path_shapes)
            return self.row.to_torch(arrays)
        except MisfitError as misfit:
            problem = Problem("refused", self.row.keys[0], f"{self.row}: {misfit}")
            raise TransferError(doing, [problem]) from misfit


@dataclass(frozen=True)
class Sides:
    """The names and shapes of both sides: torch's keys that are carried, and Flax's paths.

    follows: the side that is empty, because it follows from the other; the paths do by `sizes`.
    """

    keys: Names
    paths: Names
    follows: Literal["keys", "paths"] | None
    sizes: Sizes | None

    def have_all(self, r: Row) -> bool:
        """Return whether every name of a row is there, apart from those that follow."""
        has_keys = self.follows == "keys" or self.keys.keys() >= {*r.keys}
        return has_keys and (self.follows == "paths" or self.paths.keys() >= {*r.paths})

    def have_any(self, r: Row) -> bool:
        """Return whether a name of a row is there."""
        return _any(r.keys, self.keys) or _any(r.paths, self.paths)

    def move(self, r: Row) -> Move:
        """Return the move of a row that is there; its key shapes are those that its steps need.

        Raises MisfitError if the steps do not allow the shapes.
        """
        if self.follows == "paths" and self.sizes is not None:
            path_shapes = r.path_shapes(tuple(self.keys[key] for key in r.keys), self.sizes)
        else:
            path_shapes = tuple(self.paths[path] for path in r.paths)
        return Move(r, r.key_shapes(path_shapes), path_shapes)

    def fit(self, move: Move) -> bool:
        """Return whether the torch tensors have the shapes of the move."""
        return self.follows == "keys" or move.keys.items() <= self.keys.items()


@dataclass(frozen=True)
class Leftovers:
    """The differences between a table and two sides; false if nothing is left over.

    rows: those that have a name on either side. unmoved: those of them without a move. disputes:
    for each ambiguous group, the alternatives whose keys are there. instead: key of a row -> the
    keys that could replace it.
    """

    table: Table
    sides: Sides
    rows: list[Row]
    unmoved: list[Row]
    disputes: list[list[Rows]]
    instead: Mapping[str, str]

    @cached_property
    def claimed(self) -> tuple[set[str], set[str]]:
        """Keys and paths of all rows, of those of ambiguous groups too."""
        rows = self.rows + [r for used in self.disputes for rows in used for r in rows]
        return set(keys_of(rows)), set(paths_of(rows))

    @cached_property
    def refused(self) -> dict[str, str]:
        """Keys of no row that the table refuses, with the reasons."""
        unclaimed = _without(self.sides.keys, self.claimed[0])
        return passed(self.table.refusals, unclaimed)

    @cached_property
    def strays(self) -> tuple[Names, Names]:
        """Other keys, and paths, that no row has, with their shapes."""
        keys, paths = self.claimed
        strays = _without(self.sides.keys, keys | self.refused.keys())
        return strays, _without(self.sides.paths, paths)

    def __bool__(self) -> bool:
        sides = keys_of(self.rows), paths_of(self.rows)
        is_doubled = any(len({*names}) < len(names) for names in sides)
        return bool(is_doubled or self.unmoved or self.disputes or self.refused or any(self.strays))


def resolve(
    table: Table, keys: Names | None, paths: Names | None, sizes: Sizes | None = None
) -> tuple[list[Move], Leftovers]:
    """Return the moves between torch's tensors and Flax's arrays, and what is left over.

    keys, paths: the names on either side, with their shapes; None for a side that follows from the
    other. sizes: needed if the paths follow, since flat projections do not show them. A row without
    any name on either side is skipped, because biases may be absent.
    """
    follows: Any = "keys" if keys is None else "paths" if paths is None else None
    carried = _without(keys or {}, passed(table.passed_over, keys or ()))
    sides = Sides(carried, paths or {}, follows, sizes)
    rows: list[Row] = []
    disputes: list[list[Rows]] = []
    instead: dict[str, str] = {}
    for alternatives in (bound for group in table.groups for bound in _bound(group, sides)):
        used = [rows for rows in alternatives if _any(keys_of(rows), carried)]
        if len(used) > 1:
            disputes.append(used)
            continue
        chosen = used[0] if used else _first_fitting(alternatives, sides)
        rows += filter(sides.have_any, chosen)
        if not used:
            others = [keys_of(rows) for rows in alternatives if rows is not chosen]
            instead |= dict.fromkeys(keys_of(chosen), " or ".join(map(str, others)))
    matched = [(r, _move(r, sides)) for r in rows]
    unmoved = [r for r, move in matched if move is None]
    moves = [move for _, move in matched if move is not None]
    return moves, Leftovers(table, sides, rows, unmoved, disputes, instead)


def unused(groups: Iterable[Either], keys: Iterable[str], paths: Iterable[str]) -> list[Row]:
    """Return rows whose names are absent on both sides, except biases and optional rows."""
    keys, paths = list(keys), list(paths)
    return [
        r
        for group in groups
        if not bindings(keys_of(group.rows), keys) and not bindings(paths_of(group.rows), paths)
        for r in group.rows
        if not r.is_optional and not all(path.split(".")[-1] == "bias" for path in r.paths)
    ]


def passed(items: Iterable[Ignored | Refused], keys: Iterable[str]) -> dict[str, str]:
    """Return the keys that are passed over, or refused, with the reasons."""
    keys = list(keys)
    reasons: dict[str, str] = {}
    for item in items:
        reasons |= dict.fromkeys(filter(regex(item.key).fullmatch, keys), item.reason)
    return reasons


def keys_of(rows: Iterable[Row]) -> list[str]:
    """Return the torch keys of rows, row by row."""
    return [key for r in rows for key in r.keys]


def paths_of(rows: Iterable[Row]) -> list[str]:
    """Return the Flax paths of rows, row by row."""
    return [path for r in rows for path in r.paths]


def _move(r: Row, sides: Sides) -> Move | None:
    if not sides.have_all(r):
        return None
    try:
        move = sides.move(r)
    except MisfitError:
        return None
    return move if sides.fit(move) else None


def _bound(group: Either, sides: Sides) -> Iterator[list[Rows]]:
    """Yield the alternatives, once for every integer that the names in braces represent."""
    rows = group.rows
    by_key = bindings(keys_of(rows), sides.keys)
    by_path = bindings(paths_of(rows), sides.paths)
    every = by_key | by_path if holes(rows[0]) else {()}
    for binding in sorted(every, key=lambda binding: [int(value) for _, value in binding]):
        yield [tuple(r.at(binding) for r in a) for a in group.alternatives]


def _first_fitting(alternatives: Sequence[Rows], sides: Sides) -> Rows:
    """Return the first alternative that the module's shapes allow, else the first."""
    paths = sides.paths
    for alternative in alternatives:
        rows = [r for r in alternative if _any(r.paths, paths)]
        whole = rows and all(path in paths for path in paths_of(rows))
        if whole and all(r.fits(tuple(paths[p] for p in r.paths)) for r in rows):
            return alternative
    return alternatives[0]


def _any(names: Iterable[str], there: Names) -> bool:
    return any(name in there for name in names)


def _without(names: Names, others: Iterable[str]) -> dict[str, Shape]:
    others = set(others)
    return {name: shape for name, shape in names.items() if name not in others}
