"""Reasons why a table leaves names over: one function for each kind, with hints.

They take what `resolve` left over, and cost nothing if that is nothing.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence

from jax_attn.transfer.problems import Problem, nearest
from jax_attn.transfer.table.resolve import Leftovers, Names
from jax_attn.transfer.table.rows import Row
from jax_attn.transfer.table.steps import MisfitError, Shape, heads, heads_in, linear

WRAPPERS = {
    "module": "torch.nn.DataParallel",
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_checkpoint_wrapped_module": "torch's checkpoint_wrapper",
}
"""Names that wrappers of modules add to keys -> the wrapper."""

_HINTED = 10
"""Problems of one kind that get a hint: each compares a name with all others, which takes time."""

_KERNEL_STEPS = ((linear, heads), (linear, heads_in), (linear,))
_OTHER_STEPS = ((), (heads,))


def problems_of(left: Leftovers) -> list[Problem]:
    """Return every reason why something is left over; none if nothing is."""
    if not left:
        return []
    exports = left.sides.follows == "keys"
    written, read = ("keys", "paths") if exports else ("paths", "keys")
    return [
        *(_ambiguous(used, left) for used in left.disputes),
        *(*_doubled(left.rows, written, "writes"), *_doubled(left.rows, read, "reads")),
        *(_partial(left) if exports else (*_missing(left), *_homeless(left))),
        *_misfits(left),
        *(Problem("refused", key, reason) for key, reason in left.refused.items()),
        *_unexpected(left),
        *(_unread(left) if exports else _unwritten(left)),
    ]


def _ambiguous(used: Sequence[tuple[Row, ...]], left: Leftovers) -> Problem:
    """Report that the keys of several alternatives are present."""
    sets = [[k for r in rows for k in r.keys if k in left.sides.keys] for rows in used]
    text = f"expected the keys of one alternative, got {' and '.join(map(str, sets))}"
    return Problem("ambiguous", sets[0][0], text, "leave out all but one of these sets")


def _doubled(rows: Iterable[Row], side: str, verb: str) -> list[Problem]:
    """Report names of one side, "keys" or "paths", that several rows have."""
    users: dict[str, list[Row]] = {}
    for r in rows:
        for name in getattr(r, side):
            users.setdefault(name, []).append(r)
    return [
        Problem("doubly written", name, f"expected one row that {verb} it, got {several}")
        for name, several in users.items()
        if len(several) > 1
    ]


def _missing(left: Leftovers) -> list[Problem]:
    """Report keys that a row reads and that are absent."""
    keys, paths = left.sides.keys, left.sides.paths
    texts = []
    for r, key in ((each, key) for each in left.unmoved for key in each.keys if key not in keys):
        targets = " and ".join(f"{path} {[*paths[path]]}" for path in r.paths if path in paths)
        text = f"{r} needs it for {targets or r.paths}"
        text += f"; {left.instead[key]} could replace it" if left.instead.get(key) else ""
        texts.append((key, text))
    return _hinted("missing", texts, lambda key: _missing_hint(key, left.strays[0]))


def _missing_hint(key: str, strays: Names) -> str:
    for stray in strays:
        if stray.endswith(f".{key}"):
            prefix = stray.removesuffix(f".{key}")
            return f'{stray!r} exists{put_there(prefix)}: use layout.under("{prefix}", "")'
    if key.endswith("bias") and not any("bias" in stray for stray in strays):
        return "if torch has no bias, build the module without one"
    return nearest(key, strays)


def put_there(prefix: str) -> str:
    """Name in brackets the wrapper that adds a prefix to torch's keys; "" if it is not known."""
    author = WRAPPERS.get(prefix.split(".")[0])
    return f" ({author} adds the prefix)" if author else ""


def _homeless(left: Leftovers) -> list[Problem]:
    """Report keys that a row would carry to a path that the module lacks."""
    keys, paths = left.sides.keys, left.sides.paths
    if left.sides.follows == "paths":
        return []
    problems: list[Problem] = []
    for r in left.unmoved:
        absent = [path for path in r.paths if path not in paths]
        for key in (key for key in r.keys if absent and key in keys):
            bias = all(path.endswith("bias") for path in absent)
            near = nearest(absent[0], paths) if len(problems) < _HINTED else ""
            hint = "build the module with biases" if bias else near
            text = f"{r} would write {', '.join(absent)}, which the module lacks"
            problems.append(Problem("unexpected", key, text, hint))
    return problems


def _misfits(left: Leftovers) -> list[Problem]:
    """Report shapes that a row's steps do not allow, or that differ from those that they need."""
    sides, problems = left.sides, []
    for r in filter(sides.have_all, left.unmoved):
        try:
            move = sides.move(r)
        except MisfitError as misfit:
            name = r.keys[0] if sides.follows == "paths" else r.paths[0]
            problems.append(Problem("wrong shape", name, f"{r}: {misfit}"))
            continue
        targets = " and ".join(f"{path} {list(shape)}" for path, shape in move.paths.items())
        for key, shape in move.keys.items():
            if (got := sides.keys.get(key, shape)) != shape:
                other = _mending_row(key, got, move.paths)
                hint = f"these shapes would fit {other}" if other else ""
                text = f"expected {list(shape)} for {targets}, got {list(got)}"
                problems.append(Problem("wrong shape", key, text, hint))
    return problems


def _unexpected(left: Leftovers) -> list[Problem]:
    """Report keys that no row takes; hints name a row that would take them, or near keys."""
    keys, paths = left.strays
    claimed = left.claimed[0]
    expected = sorted(claimed - left.sides.keys.keys() or claimed)

    def hint(key: str) -> str:
        mend = _mending_row(key, keys[key], paths)
        return f"{mend} would take it" if mend else nearest(key, expected)

    texts = [(key, f"no row takes it, {list(shape)}") for key, shape in keys.items()]
    return _hinted("unexpected", texts, hint)


def _unwritten(left: Leftovers) -> list[Problem]:
    """Report paths that no row writes."""
    text = "expected every parameter to be written, but no row writes this one, "
    texts = [(path, f"{text}{list(shape)}") for path, shape in left.strays[1].items()]
    homeless = sorted(left.claimed[1] - left.sides.paths.keys())
    return _hinted("unwritten", texts, lambda path: nearest(path, homeless))


def _partial(left: Leftovers) -> list[Problem]:
    """Report paths that the module lacks, although it has others of the same row."""
    paths = left.sides.paths
    absent = [(r, path) for r in left.unmoved for path in r.paths if path not in paths]
    texts = [(path, f"{r} needs it, but the module lacks it") for r, path in absent]
    return _hinted("missing", texts, lambda path: nearest(path, left.strays[1]))


def _unread(left: Leftovers) -> list[Problem]:
    """Report paths that no row reads."""
    texts = [(path, f"no row reads it, {list(shape)}") for path, shape in left.strays[1].items()]
    return _hinted("unexpected", texts, lambda path: nearest(path, left.claimed[1]))


def _hinted(
    kind: str, texts: Iterable[tuple[str, str]], hint: Callable[[str], str]
) -> list[Problem]:
    """Make a problem for each name and text, the first few with a hint."""
    return [
        Problem(kind, name, text, hint(name) if i < _HINTED else "")
        for i, (name, text) in enumerate(texts)
    ]


def _mending_row(key: str, shape: Shape, paths: Names) -> str:
    """Return the row that carries `key` to the path of matching shape and nearest name, or ''."""
    fits: dict[str, Row] = {}
    for path, path_shape in paths.items():
        for steps in _KERNEL_STEPS if path.endswith("kernel") else _OTHER_STEPS:
            candidate = Row((key,), (path,), steps)
            if candidate.fits((path_shape,)) == (shape,):
                fits.setdefault(path, candidate)
    best = difflib.get_close_matches(key, fits, n=1, cutoff=0)
    return repr(fits[best[0]]) if best else ""
