"""Choice of the rows of a table for given names and shapes; `reasons` explains the others."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jax_attn.transfer.problems import Problem, TransferError
from jax_attn.transfer.table import reasons
from jax_attn.transfer.table.rows import (
    Either,
    Ignored,
    Refused,
    Row,
    bindings,
    filled,
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

    def carried(self, to: Literal["flax", "torch"], arrays: Arrays, doing: str) -> Arrays:
        """Convert one side's arrays to the other's; raise TransferError if a step fails."""
        try:
            if to == "flax":
                return self.row.to_flax(arrays, self.path_shapes)
            return self.row.to_torch(arrays)
        except MisfitError as misfit:
            problem = Problem("refused", self.row.keys[0], f"{self.row}: {misfit}")
            raise TransferError(doing, [problem]) from misfit


def for_loading(
    groups: Iterable[Either], refusals: Iterable[Refused], keys: Names, paths: Names
) -> tuple[list[Move], list[Problem]]:
    """Return the moves from torch tensors to a module's arrays, and the problems.

    keys, paths: names to shapes. A row without any key or path present is skipped, because biases
    may be absent.
    """
    rows: list[Row] = []
    present, disputed, problems = _by_keys(groups, keys, paths)
    instead: dict[str, str] = {}
    for alternatives, used in present:
        chosen = used or _first_fitting(alternatives, paths)
        rows += [r for r in chosen if _any(r.keys, keys) or _any(r.paths, paths)]
        if not used:
            others = [keys_of(a) for a in alternatives if a is not chosen]
            instead |= {key: " or ".join(map(str, others)) for key in keys_of(chosen)}
    claimed_keys = set(keys_of(rows + disputed))
    claimed_paths = {path for r in rows + disputed for path in r.paths}
    refused, stray_keys = reasons.refused(refusals, _without(keys, claimed_keys))
    stray_paths = _without(paths, claimed_paths)
    moves, unfit = _fitted(rows, keys, paths)
    problems += reasons.doubled(rows, "paths", "writes") + reasons.doubled(rows, "keys", "reads")
    problems += reasons.missing(rows, keys, paths, stray_keys, instead)
    problems += reasons.homeless(rows, keys, paths) + unfit + refused
    expected = claimed_keys - keys.keys() or claimed_keys
    problems += reasons.unexpected(stray_keys, stray_paths, expected)
    problems += reasons.unwritten(stray_paths, claimed_paths - paths.keys())
    return moves, problems


def for_export(groups: Iterable[Either], paths: Names) -> tuple[list[Move], list[Problem]]:
    """Return the moves from a module's arrays (`paths` to shapes) to torch keys, and problems."""
    rows: list[Row] = []
    for group in groups:
        for alternatives in _bound(group, {}, paths):
            chosen = _first_fitting(alternatives, paths)
            rows += [r for r in chosen if _any(r.paths, paths)]
    claimed = {path for r in rows for path in r.paths}
    strays = _without(paths, claimed)
    absent = [(r, path) for r in rows for path in r.paths if path not in paths]
    moves, unfit = _fitted(rows, None, paths)
    problems = reasons.doubled(rows, "keys", "writes") + reasons.doubled(rows, "paths", "reads")
    problems += reasons.partial(absent, strays) + unfit
    return moves, problems + reasons.unread(strays, claimed)


def for_shapes(
    groups: Iterable[Either], refusals: Iterable[Refused], keys: Names, sizes: Sizes
) -> tuple[dict[str, Shape], list[Problem]]:
    """Return the Flax shapes, by path, of torch tensors (`keys` to shapes), and the problems."""
    present, disputed, problems = _by_keys(groups, keys, {})
    rows = [r for _, used in present for r in used if _any(r.keys, keys)]
    claimed = set(keys_of(rows + disputed))
    refused, strays = reasons.refused(refusals, _without(keys, claimed))
    problems += reasons.doubled(rows, "paths", "writes") + reasons.doubled(rows, "keys", "reads")
    problems += reasons.missing(rows, keys, {}, strays, {})
    shapes: dict[str, Shape] = {}
    for r in rows:
        if not keys.keys() >= {*r.keys}:
            continue
        try:
            targets = r.path_shapes(tuple(keys[key] for key in r.keys), sizes)
        except MisfitError as misfit:
            problems.append(Problem("wrong shape", r.keys[0], f"{r}: {misfit}"))
        else:
            shapes |= zip(r.paths, targets, strict=True)
    return shapes, problems + refused + reasons.unexpected(strays, {}, claimed)


def unused(groups: Iterable[Either], keys: Iterable[str], paths: Iterable[str]) -> list[Row]:
    """Return rows whose names are absent on both sides, except biases and optional rows."""
    keys, paths = list(keys), list(paths)
    return [
        r
        for group in groups
        if not bindings(keys_of(group.rows), keys) and not bindings(_paths_of(group.rows), paths)
        for r in group.rows
        if not r.is_optional and not all(path.split(".")[-1] == "bias" for path in r.paths)
    ]


def keys_of(rows: Iterable[Row]) -> list[str]:
    """Return the torch keys of rows, row by row."""
    return [key for r in rows for key in r.keys]


def _paths_of(rows: Iterable[Row]) -> list[str]:
    return [path for r in rows for path in r.paths]


def passed(items: Iterable[Ignored], keys: Iterable[str]) -> dict[str, str]:
    """Return the keys that are passed over, with the reasons."""
    keys = list(keys)
    patterns = [(regex(item.key), item.reason) for item in items]
    return {k: why for pattern, why in patterns for k in keys if pattern.fullmatch(k)}


def ties(item: Ignored, keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (key, the key that it repeats), if both are present."""
    if not item.same_as:
        return
    keys = list(keys)
    for binding in bindings([item.key], keys):
        key, other = filled((item.key, item.same_as), binding)
        if key in keys and other in keys:
            yield key, other


def _by_keys(
    groups: Iterable[Either], keys: Names, paths: Names
) -> tuple[list[tuple[list[Rows], Rows]], list[Row], list[Problem]]:
    """Return groups with their used alternative, rows of ambiguous groups, and problems.

    A group is a list of alternatives; the used one has keys present, () if none has.
    """
    present: list[tuple[list[Rows], Rows]] = []
    disputed: list[Row] = []
    problems = []
    for alternatives in (bound for group in groups for bound in _bound(group, keys, paths)):
        used = [a for a in alternatives if _any(keys_of(a), keys)]
        if len(used) > 1:
            problems.append(reasons.ambiguous(used, keys))
            disputed += [r for a in used for r in a]
        else:
            present.append((alternatives, used[0] if used else ()))
    return present, disputed, problems


def _bound(group: Either, keys: Names, paths: Names) -> Iterator[list[Rows]]:
    """Yield the alternatives, once for every integer that the names in braces represent."""
    rows = group.rows
    by_key = bindings(keys_of(rows), keys)
    by_path = bindings(_paths_of(rows), paths)
    every = by_key | by_path if holes(rows[0]) else {()}
    for binding in sorted(every, key=lambda binding: [int(value) for _, value in binding]):
        yield [tuple(r.at(binding) for r in a) for a in group.alternatives]


def _without(names: Names, claimed: set[str]) -> dict[str, Shape]:
    return {name: shape for name, shape in names.items() if name not in claimed}


def _any(names: Sequence[str], there: Names) -> bool:
    return any(name in there for name in names)


def _first_fitting(alternatives: Sequence[Rows], paths: Names) -> Rows:
    """Return the first alternative that the module's shapes allow, else the first."""
    for alternative in alternatives:
        rows = [r for r in alternative if _any(r.paths, paths)]
        whole = rows and all(path in paths for r in rows for path in r.paths)
        if whole and all(r.fits(tuple(paths[p] for p in r.paths)) for r in rows):
            return alternative
    return alternatives[0]


def _fitted(
    rows: Iterable[Row], keys: Names | None, paths: Names
) -> tuple[list[Move], list[Problem]]:
    """Return moves of the rows that are wholly present, and problems of rows with wrong shapes."""
    moves, problems = [], []
    for r in rows:
        if not (paths.keys() >= {*r.paths} and (keys is None or keys.keys() >= {*r.keys})):
            continue
        path_shapes = tuple(paths[path] for path in r.paths)
        try:
            key_shapes = r.key_shapes(path_shapes)
        except MisfitError as misfit:
            problems.append(Problem("wrong shape", r.paths[0], f"{r}: {misfit}"))
            continue
        wrong = [] if keys is None else reasons.misshapen(r, key_shapes, keys, paths)
        problems += wrong
        if not wrong:
            moves.append(Move(r, key_shapes, path_shapes))
    return moves, problems
