"""Reasons why rows of a table do not apply: each function reports one kind, with hints."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence

from jax_attn.transfer.problems import Problem, nearest
from jax_attn.transfer.table.rows import Refused, Row, regex
from jax_attn.transfer.table.steps import Shape, Shapes, heads, heads_in, linear

Names = Mapping[str, Shape]
WRAPPERS = {"module": "torch.nn.DataParallel", "_orig_mod": "torch.compile"}

_HINTED = 10
"""Problems of one kind that get a hint: each compares a name with all others, which takes time."""

_KERNEL_STEPS = ((linear, heads), (linear, heads_in), (linear,))
_OTHER_STEPS = ((), (heads,))


def misshapen(r: Row, expected: Shapes, keys: Names, paths: Names) -> list[Problem]:
    """Report tensors whose shapes differ from those that a row's arrays need."""
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
    """Report that the keys of several alternatives are present."""
    sets = [[key for r in rows for key in r.keys if key in keys] for rows in there]
    text = f"expected the keys of one alternative, got {' and '.join(map(str, sets))}"
    return Problem("ambiguous", sets[0][0], text, "leave out all but one of these sets")


def doubled(rows: Iterable[Row], side: str, verb: str) -> list[Problem]:
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


def missing(
    rows: Iterable[Row], keys: Names, paths: Names, strays: Names, instead: Mapping[str, str]
) -> list[Problem]:
    """Report keys that a row reads and that are absent.

    instead: the keys that could replace each.
    """
    absent = [(r, key) for r in rows for key in r.keys if key not in keys]
    texts = []
    for r, key in absent:
        targets = " and ".join(f"{path} {[*paths[path]]}" for path in r.paths if path in paths)
        text = f"{r} needs it for {targets or r.paths}"
        text += f"; {instead[key]} could replace it" if instead.get(key) else ""
        texts.append((key, text))
    return _hinted("missing", texts, lambda key: _missing_hint(key, strays))


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


def homeless(rows: Iterable[Row], keys: Names, paths: Names) -> list[Problem]:
    """Report keys that a row would carry to a path that the module lacks."""
    problems: list[Problem] = []
    for r in rows:
        absent = [path for path in r.paths if path not in paths]
        for key in (key for key in r.keys if absent and key in keys):
            bias = all(path.endswith("bias") for path in absent)
            near = nearest(absent[0], paths) if len(problems) < _HINTED else ""
            hint = "build the module with biases" if bias else near
            text = f"{r} would write {', '.join(absent)}, which the module lacks"
            problems.append(Problem("unexpected", key, text, hint))
    return problems


def refused(
    refusals: Iterable[Refused], keys: dict[str, Shape]
) -> tuple[list[Problem], dict[str, Shape]]:
    """Report keys that the table refuses; also return the other keys."""
    reasons: dict[str, str] = {}
    for refusal in refusals:
        for key in filter(regex(refusal.key).fullmatch, keys):
            reasons.setdefault(key, refusal.reason)
    problems = [Problem("refused", key, reason) for key, reason in reasons.items()]
    return problems, {key: shape for key, shape in keys.items() if key not in reasons}


def unexpected(strays: Names, paths: Names, expected: Iterable[str]) -> list[Problem]:
    """Report keys that no row takes; hints name a row that would take them, or near keys."""
    expected = sorted(expected)

    def hint(key: str) -> str:
        mend = mending_row(key, strays[key], paths)
        return f"{mend} would take it" if mend else nearest(key, expected)

    texts = [(key, f"no row takes it, {list(shape)}") for key, shape in strays.items()]
    return _hinted("unexpected", texts, hint)


def unwritten(strays: Names, homeless: Iterable[str]) -> list[Problem]:
    """Report paths that no row writes; homeless: absent paths that a row would write."""
    text = "expected every nnx.Param to be written, but no row writes this one, "
    texts = [(path, f"{text}{list(shape)}") for path, shape in strays.items()]
    homeless = sorted(homeless)
    return _hinted("unwritten", texts, lambda path: nearest(path, homeless))


def partial(absent: Iterable[tuple[Row, str]], strays: Iterable[str]) -> list[Problem]:
    """Report paths that the module lacks, although it has others of the same row."""
    texts = [(path, f"{r} needs it, but the module lacks it") for r, path in absent]
    return _hinted("missing", texts, lambda path: nearest(path, strays))


def unread(strays: Names, claimed: Iterable[str]) -> list[Problem]:
    """Report paths that no row reads."""
    texts = [(path, f"no row reads it, {list(shape)}") for path, shape in strays.items()]
    return _hinted("unexpected", texts, lambda path: nearest(path, claimed))


def _hinted(
    kind: str, texts: Iterable[tuple[str, str]], hint: Callable[[str], str]
) -> list[Problem]:
    """Make a problem for each name and text, the first few with a hint."""
    return [
        Problem(kind, name, text, hint(name) if i < _HINTED else "")
        for i, (name, text) in enumerate(texts)
    ]


def mending_row(key: str, shape: Shape, paths: Names) -> str:
    """Return the row that carries `key` to the path of matching shape and nearest name, or ''."""
    fits: dict[str, Row] = {}
    for path, path_shape in paths.items():
        for steps in _KERNEL_STEPS if path.endswith("kernel") else _OTHER_STEPS:
            candidate = Row((key,), (path,), steps)
            if candidate.fits((path_shape,)) == (shape,):
                fits.setdefault(path, candidate)
    best = difflib.get_close_matches(key, fits, n=1, cutoff=0)
    return repr(fits[best[0]]) if best else ""
