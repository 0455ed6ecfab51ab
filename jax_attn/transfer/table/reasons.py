"""Why rows of a table do not apply: each function gives the problems of one kind, with hints."""

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from jax_attn.transfer.problems import Problem, nearest
from jax_attn.transfer.table.rows import Refused, Row, regex
from jax_attn.transfer.table.step import Shape, Shapes
from jax_attn.transfer.table.steps import heads, heads_in, linear

Names = Mapping[str, Shape]
WRAPPERS = {"module": "torch.nn.DataParallel", "_orig_mod": "torch.compile"}

# Hints compare every name with every other: past this many they are not worth the wait.
_HINTED = 10

_KERNEL_STEPS = ((linear, heads), (linear, heads_in), (linear,))
_OTHER_STEPS = ((), (heads,))


def misshapen(r: Row, expected: Shapes, keys: Names, paths: Names) -> list[Problem]:
    """Tensors of other shapes than a row's arrays ask for."""
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


def ambiguous(there: Sequence[tuple[Row, ...]], keys: Names) -> Problem:
    """Several alternatives of which keys are there."""
    sets = [[key for r in rows for key in r.keys if key in keys] for rows in there]
    found = " and ".join(map(str, sets))
    return Problem(
        "ambiguous",
        sets[0][0],
        f"expected the keys of one alternative, got {found}",
        "leave out all but one of these sets",
    )


def doubled(rows: Iterable[Row], side: str, verb: str) -> list[Problem]:
    """Names of one side, "keys" or "paths", that several rows have."""
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


def missing(
    rows: Iterable[Row], keys: Names, paths: Names, strays: Names, instead: Mapping[str, str]
) -> list[Problem]:
    """Keys that a row reads and that are not there; instead: what else would do for one."""
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


def homeless(rows: Iterable[Row], keys: Names, paths: Names) -> list[Problem]:
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


def refused(
    refusals: Iterable[Refused], keys: dict[str, Shape]
) -> tuple[list[Problem], dict[str, Shape]]:
    """Keys that are never taken; and the others."""
    problems, left = [], dict(keys)
    for refusal in refusals:
        match = regex(refusal.key).fullmatch
        for key in [key for key in left if match(key)]:
            problems.append(Problem("refused", key, refusal.reason))
            del left[key]
    return problems, left


def unexpected(strays: Names, paths: Names, expected: Iterable[str]) -> list[Problem]:
    """Keys that no row takes; the row that would take one to `paths`, or the nearest expected."""
    expected = sorted(expected)
    problems = []
    for i, (key, shape) in enumerate(strays.items()):
        hint = ""
        if i < _HINTED:
            mend = mending_row(key, shape, paths)
            hint = f"{mend} would take it" if mend else nearest(key, expected)
        problems.append(Problem("unexpected", key, f"no row takes it, {list(shape)}", hint))
    return problems


def unwritten(strays: Names, homeless: Iterable[str]) -> list[Problem]:
    """Paths that no row writes; homeless: those that a row would write, and are not there."""
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


def partial(absent: Iterable[tuple[Row, str]], strays: Iterable[str]) -> list[Problem]:
    """Paths that a row reads with others, and the module lacks."""
    return [
        Problem(
            "missing",
            path,
            f"{r} needs it, the module lacks it",
            nearest(path, strays) if i < _HINTED else "",
        )
        for i, (r, path) in enumerate(absent)
    ]


def unread(strays: Names, claimed: Iterable[str]) -> list[Problem]:
    """Paths that no row takes to torch."""
    return [
        Problem(
            "unexpected",
            path,
            f"no row reads it, {list(shape)}",
            nearest(path, claimed) if i < _HINTED else "",
        )
        for i, (path, shape) in enumerate(strays.items())
    ]


def mending_row(key: str, shape: Shape, paths: Names) -> str:
    """The row that would carry `key` to the best named of `paths` whose shape fits, or ''."""
    fits: dict[str, Row] = {}
    for path, path_shape in paths.items():
        for steps in _KERNEL_STEPS if path.endswith("kernel") else _OTHER_STEPS:
            candidate = Row((key,), (path,), steps)
            if candidate.fits((path_shape,)) == (shape,):
                fits.setdefault(path, candidate)
    best = difflib.get_close_matches(key, fits, n=1, cutoff=0)
    return repr(fits[best[0]]) if best else ""
