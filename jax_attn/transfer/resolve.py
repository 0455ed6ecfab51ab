"""Which rows of a table apply to the names at hand, and every reason why they do not."""

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jax_attn.transfer.problems import Problem, grid, nearest
from jax_attn.transfer.rows import (
    Binding,
    Either,
    Ignored,
    Refused,
    Row,
    bindings,
    filled,
    holes,
    regex,
)
from jax_attn.transfer.steps import MisfitError, Shape, Shapes, Sizes, heads, heads_in, linear

Names = Mapping[str, Shape]

# Hints compare every name with every other: past this many they are not worth the wait.
_HINTED = 10

_KERNEL_STEPS = ((linear, heads), (linear, heads_in), (linear,))
_OTHER_STEPS = ((), (heads,))

WRAPPERS = {"module": "torch.nn.DataParallel", "_orig_mod": "torch.compile"}


@dataclass(frozen=True)
class Move:
    """A row that applies: its names and its shapes on both sides."""

    row: Row
    key_shapes: Shapes
    path_shapes: Shapes


def table(moves: Iterable[Move], dtype: Callable[[Move], str]) -> str:
    """Lines for people, one a move: both sides' names and shapes, dtype and steps."""
    return grid(
        ("torch", "shape", "flax", "shape", "dtype", "steps"),
        (
            (
                ", ".join(move.row.keys),
                ", ".join(str(list(shape)) for shape in move.key_shapes),
                ", ".join(move.row.paths),
                ", ".join(str(list(shape)) for shape in move.path_shapes),
                dtype(move),
                " ".join(step.name for step in move.row.steps) or "=",
            )
            for move in moves
        ),
    )


def for_loading(
    groups: Iterable[Either], refusals: Iterable[Refused], keys: Names, paths: Names
) -> tuple[list[Move], list[Problem]]:
    """Rows that carry torch tensors (`keys` to shapes) to a module's arrays (`paths` to shapes).

    A row of which nothing is there on either side does not count: biases may be absent.
    """
    rows, problems, disputed = [], [], []
    instead: dict[str, str] = {}
    for group in groups:
        for alternatives in _bound(group, keys, paths):
            there = [a for a in alternatives if _any(_keys(a), keys)]
            if len(there) > 1:
                problems.append(_ambiguous(there, keys))
                disputed += [r for a in there for r in a]
                continue
            chosen = there[0] if there else _first_fitting(alternatives, paths)
            rows += [r for r in chosen if _any(r.keys, keys) or _any(r.paths, paths)]
            if not there:
                others = [_keys(a) for a in alternatives if a is not chosen]
                instead |= {key: " or ".join(map(str, others)) for key in _keys(chosen)}
    claimed_keys = {key for r in rows + disputed for key in r.keys}
    claimed_paths = {path for r in rows + disputed for path in r.paths}
    stray_keys = {key: shape for key, shape in keys.items() if key not in claimed_keys}
    stray_paths = {path: shape for path, shape in paths.items() if path not in claimed_paths}

    refused, stray_keys = _refused(refusals, stray_keys)
    moves, unfit = _fitted(rows, keys, paths)
    problems += _doubled(rows, "paths", "writes") + _doubled(rows, "keys", "reads")
    problems += _missing(rows, keys, paths, stray_keys, instead) + _homeless(rows, keys, paths)
    problems += unfit + refused
    problems += _unexpected(stray_keys, stray_paths, claimed_keys - keys.keys() or claimed_keys)
    problems += _unwritten(stray_paths, claimed_paths - paths.keys())
    return moves, problems


def for_export(groups: Iterable[Either], paths: Names) -> tuple[list[Move], list[Problem]]:
    """Rows that carry a module's arrays (`paths` to shapes) to torch keys."""
    rows = []
    for group in groups:
        for alternatives in _bound(group, {}, paths):
            chosen = _first_fitting(alternatives, paths)
            rows += [r for r in chosen if _any(r.paths, paths)]
    claimed = {path for r in rows for path in r.paths}
    strays = [path for path in paths if path not in claimed]
    partial = [(r, path) for r in rows for path in r.paths if path not in paths]
    complete = [r for r in rows if all(path in paths for path in r.paths)]
    moves, unfit = _fitted(complete, None, paths)
    problems = _doubled(rows, "keys", "writes") + _doubled(rows, "paths", "reads")
    problems += [
        Problem(
            "missing",
            path,
            f"{r} needs it, the module lacks it",
            nearest(path, strays) if i < _HINTED else "",
        )
        for i, (r, path) in enumerate(partial)
    ]
    problems += unfit
    problems += [
        Problem(
            "unexpected",
            path,
            f"no row reads it, {list(paths[path])}",
            nearest(path, claimed) if i < _HINTED else "",
        )
        for i, path in enumerate(strays)
    ]
    return moves, problems


def for_shapes(
    groups: Iterable[Either], refusals: Iterable[Refused], keys: Names, sizes: Sizes
) -> tuple[dict[str, Shape], list[Problem]]:
    """What torch tensors (`keys` to shapes) become: dotted paths to shapes."""
    rows, problems, disputed = [], [], []
    for group in groups:
        for alternatives in _bound(group, keys, {}):
            there = [a for a in alternatives if _any(_keys(a), keys)]
            if len(there) > 1:
                problems.append(_ambiguous(there, keys))
                disputed += [r for a in there for r in a]
            elif there:
                rows += [r for r in there[0] if _any(r.keys, keys)]
    claimed = {key for r in rows + disputed for key in r.keys}
    refused, strays = _refused(refusals, {k: s for k, s in keys.items() if k not in claimed})
    problems += _doubled(rows, "paths", "writes") + _doubled(rows, "keys", "reads")
    problems += _missing(rows, keys, {}, strays, {})
    made: dict[str, Shape] = {}
    for r in rows:
        if not all(key in keys for key in r.keys):
            continue
        try:
            made |= zip(r.paths, r.path_shapes(tuple(keys[k] for k in r.keys), sizes), strict=True)
        except MisfitError as misfit:
            problems.append(Problem("wrong shape", r.keys[0], f"{r}: {misfit}"))
    return made, problems + refused + _unexpected(strays, {}, claimed)


def passed(items: Iterable[Ignored], keys: Iterable[str]) -> dict[str, str]:
    """The keys that are passed over, and why."""
    keys = list(keys)
    patterns = [(regex(item.key), item.reason) for item in items]
    return {k: why for pattern, why in patterns for k in keys if pattern.fullmatch(k)}


def ties(item: Ignored, keys: Iterable[str]) -> Iterable[tuple[str, str]]:
    """(key, the key it repeats), where both are there."""
    if not item.same_as:
        return
    keys = list(keys)
    for binding in bindings([item.key], keys):
        key, other = filled((item.key, item.same_as), binding)
        if key in keys and other in keys:
            yield key, other


def mending_row(key: str, shape: Shape, paths: Names) -> str:
    """The row that would carry `key` to the best named of `paths` whose shape fits, or ''."""
    fits: dict[str, Row] = {}
    for path, path_shape in paths.items():
        for steps in _KERNEL_STEPS if path.endswith("kernel") else _OTHER_STEPS:
            candidate = Row((key,), (path,), steps)
            if _key_shapes(candidate, (path_shape,)) == (shape,):
                fits.setdefault(path, candidate)
    best = difflib.get_close_matches(key, fits, n=1, cutoff=0)
    return repr(fits[best[0]]) if best else ""


def _bound(group: Either, keys: Names, paths: Names) -> Iterable[list[tuple[Row, ...]]]:
    """The alternatives, once for every integer that the names in braces stand for."""
    for binding in _all_bindings(group, keys, paths):
        yield [tuple(r.at(binding) for r in a) for a in group.alternatives]


def _all_bindings(group: Either, keys: Names, paths: Names) -> list[Binding]:
    rows = [r for a in group.alternatives for r in a]
    if not holes(rows[0]):
        return [()]
    by_key = bindings([key for r in rows for key in r.keys], keys)
    by_path = bindings([path for r in rows for path in r.paths], paths)
    return sorted(by_key | by_path, key=lambda binding: [int(value) for _, value in binding])


def _keys(rows: Iterable[Row]) -> list[str]:
    return [key for r in rows for key in r.keys]


def _any(names: Sequence[str], there: Names) -> bool:
    return any(name in there for name in names)


def _key_shapes(r: Row, path_shapes: Shapes) -> Shapes | None:
    try:
        return r.key_shapes(path_shapes)
    except MisfitError:
        return None


def _first_fitting(alternatives: Sequence[tuple[Row, ...]], paths: Names) -> tuple[Row, ...]:
    """The first alternative that the module's shapes allow; the first of all when none does."""
    for alternative in alternatives:
        rows = [r for r in alternative if _any(r.paths, paths)]
        whole = rows and all(path in paths for r in rows for path in r.paths)
        if whole and all(_key_shapes(r, tuple(paths[p] for p in r.paths)) for r in rows):
            return alternative
    return alternatives[0]


def _fitted(
    rows: Iterable[Row], keys: Names | None, paths: Names
) -> tuple[list[Move], list[Problem]]:
    """Moves of the rows that are whole; problems of those whose shapes do not fit."""
    moves, problems = [], []
    for r in rows:
        if not all(path in paths for path in r.paths):
            continue
        if keys is not None and not all(key in keys for key in r.keys):
            continue
        path_shapes = tuple(paths[path] for path in r.paths)
        try:
            key_shapes = r.key_shapes(path_shapes)
        except MisfitError as misfit:
            problems.append(Problem("wrong shape", r.paths[0], f"{r}: {misfit}"))
            continue
        wrong = [] if keys is None else _misshapen(r, key_shapes, keys, paths)
        problems += wrong
        if not wrong:
            moves.append(Move(r, key_shapes, path_shapes))
    return moves, problems


def _misshapen(r: Row, expected: Shapes, keys: Names, paths: Names) -> list[Problem]:
    targets = " and ".join(f"{path} {list(paths[path])}" for path in r.paths)
    problems = []
    for key, shape in zip(r.keys, expected, strict=True):
        if keys[key] == shape:
            continue
        other = mending_row(key, keys[key], {path: paths[path] for path in r.paths})
        hint = f"these shapes would fit {other}" if other else ""
        text = f"expected {list(shape)} for {targets}, got {list(keys[key])}"
        problems.append(Problem("wrong shape", key, text, hint))
    return problems


def _ambiguous(there: Sequence[tuple[Row, ...]], keys: Names) -> Problem:
    sets = [[key for key in _keys(a) if key in keys] for a in there]
    found = " and ".join(map(str, sets))
    return Problem(
        "ambiguous",
        sets[0][0],
        f"expected the keys of one alternative, got {found}",
        "leave out all but one of these sets",
    )


def _doubled(rows: Iterable[Row], side: str, verb: str) -> list[Problem]:
    rows = list(rows)
    users = Counter(name for r in rows for name in getattr(r, side))
    return [
        Problem(
            "doubly written",
            name,
            f"expected one row that {verb} it, got {[r for r in rows if name in getattr(r, side)]}",
        )
        for name, count in users.items()
        if count > 1
    ]


def _missing(
    rows: Iterable[Row], keys: Names, paths: Names, strays: Names, instead: Mapping[str, str]
) -> list[Problem]:
    absent = [
        (r, key)
        for r in rows
        if not all(key in keys for key in r.keys)
        for key in r.keys
        if key not in keys
    ]
    problems = []
    for i, (r, key) in enumerate(absent):
        targets = " and ".join(f"{path} {[*paths[path]]}" for path in r.paths if path in paths)
        text = f"{r} needs it for {targets or r.paths}"
        text += f"; {instead[key]} would do instead" if instead.get(key) else ""
        problems.append(
            Problem("missing", key, text, _missing_hint(key, strays) if i < _HINTED else "")
        )
    return problems


def _missing_hint(key: str, strays: Names) -> str:
    for stray in strays:
        if stray.endswith(f".{key}"):
            prefix = stray.removesuffix(f".{key}")
            author = WRAPPERS.get(prefix.split(".")[0])
            by = f" ({author} puts the prefix there)" if author else ""
            return f'{stray!r} is there{by}: use layout.under("{prefix}", "")'
    if key.endswith("bias") and not any("bias" in stray for stray in strays):
        return "where torch has no bias, build the module without one"
    return nearest(key, strays)


def _homeless(rows: Iterable[Row], keys: Names, paths: Names) -> list[Problem]:
    """Keys that a row would carry to a path that the module lacks."""
    problems = []
    for r in rows:
        absent = [path for path in r.paths if path not in paths]
        for key in r.keys if absent else ():
            if key in keys:
                lacking = ", ".join(absent)
                bias = all(path.endswith("bias") for path in absent)
                near = nearest(absent[0], paths) if len(problems) < _HINTED else ""
                hint = "build the module with biases" if bias else near
                text = f"{r} would write {lacking}, which the module lacks"
                problems.append(Problem("unexpected", key, text, hint))
    return problems


def _refused(
    refusals: Iterable[Refused], keys: dict[str, Shape]
) -> tuple[list[Problem], dict[str, Shape]]:
    problems, left = [], dict(keys)
    for refusal in refusals:
        match = regex(refusal.key).fullmatch
        for key in [key for key in left if match(key)]:
            problems.append(Problem("refused", key, refusal.reason))
            del left[key]
    return problems, left


def _unexpected(strays: Names, paths: Names, expected: Iterable[str]) -> list[Problem]:
    expected = sorted(expected)
    problems = []
    for i, (key, shape) in enumerate(strays.items()):
        hint = ""
        if i < _HINTED:
            mend = mending_row(key, shape, paths)
            hint = f"{mend} would take it" if mend else nearest(key, expected)
        problems.append(Problem("unexpected", key, f"no row takes it, {list(shape)}", hint))
    return problems


def _unwritten(strays: Names, homeless: Iterable[str]) -> list[Problem]:
    homeless = sorted(homeless)
    return [
        Problem(
            "unwritten",
            path,
            f"expected every nnx.Param to be written, no row writes this one, {list(shape)}",
            nearest(path, homeless) if i < _HINTED else "",
        )
        for i, (path, shape) in enumerate(strays.items())
    ]
