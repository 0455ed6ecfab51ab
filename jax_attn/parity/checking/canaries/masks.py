"""Canaries of masks among the inputs: each is inverted, and ignored."""

import inspect

import ml_dtypes
import numpy as np

from jax_attn.parity.bugs.planting import Watched, Watcher, run_planted
from jax_attn.parity.bugs.softmax import NO_KEY, SOME_HIDDEN, Weightless
from jax_attn.parity.bugs.tensors import with_inputs
from jax_attn.parity.checking.canaries.attention_facts import AttentionFacts
from jax_attn.parity.checking.canaries.findings import doubt
from jax_attn.parity.checking.canaries.seen import same
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.finding import Finding, Findings, StandingNote
from jax_attn.parity.run.inputs_and_runs import Run, is_float, wide
from jax_attn.parity.run.reference import Reference


def try_masks(prepared: Prepared, facts: AttentionFacts, *watchers: Watcher) -> Findings:
    """Doubt or note each mask among the inputs that a port could invert or ignore unseen.

    An ignored mask has one value throughout, in either polarity. watchers: see these runs.
    """
    doubts = []
    notes: list[Finding] = []
    for name, mask in prepared.inputs.by_name.items():
        if not is_mask(prepared.reference, name, mask):
            continue
        hides, shows = _ends(mask)
        may_empty = facts.hides and not facts.empties and bool(np.isin(mask, (0, 1)).all())
        for bug, wrong_mask in (
            ("inverted", np.where(mask == shows, hides, shows)),
            ("ignored", np.full_like(mask, shows)),
            ("ignored", np.full_like(mask, hides)),  # of the other polarity
        ):
            other = with_inputs(prepared.reference, {name: wrong_mask})
            run = run_planted(other, Watched(*watchers))
            may_empty = may_empty and run is not None and _is_finite(run)
            if run is None:
                refused = (
                    f"whether these inputs would reveal that mask {name!r} is {bug} was not "
                    "checked: the reference raises an error on the mask that this takes"
                )
                notes.append(Finding("mask-not-tried", refused))
            elif not prepared.would_fail(run):
                first = mask.flat[0]
                reason = f"it is {first} everywhere" if (mask == first).all() else NO_KEY
                what = f"that mask {name!r} is {bug}"
                doubts.append(doubt(f"{bug}-mask", what, reason, SOME_HIDDEN))
                break
        else:
            if may_empty:
                leaves = (
                    f"mask {name!r} leaves every query a key, so what the port gives a query "
                    "without keys was not checked; to show it, use a query whose keys are all "
                    "hidden"
                )
                weight = Finding if _is_of_queries(mask) else StandingNote
                notes.append(weight("no-empty-query", leaves))
    return Findings(doubts=tuple(doubts), notes=tuple(dict.fromkeys(notes)))


def _is_of_queries(mask: np.ndarray) -> bool:
    """Return whether a mask hides keys query by query, (B, T, S), and not only in whole texts."""
    return mask.ndim > 2 and mask.shape[-2] > 1


def _is_finite(run: Run) -> bool:
    return all(np.isfinite(a).all() for a in run.kinds["output"].values())


def is_mask(reference: Reference, name: str, a: np.ndarray) -> bool:
    """Return whether an input is a mask.

    Booleans are. Arrays of 0 and 1, or of numbers <= 0 that are added to the scores, are masks if
    their parameter is named like one. Others are tested by their effect on the softmax: a mask
    hides keys, or would if it had another value.
    """
    if a.size == 0 or a.dtype == bool:
        return a.size > 0
    x = wide({"": a})[""]
    fits = np.isin(x, (0, 1)).all() or (is_float(a.dtype) and (x <= 0).all())
    spoken = parameter_name(reference, name).lower()
    if not fits or any(word in spoken for word in _MASK_NAMES):
        return bool(fits)
    if x.min() != x.max():
        return bool(np.isin(x, (0, 1)).all()) and _hides_some(reference, name, a)
    if x.max() not in (0, 1) or not _hides(reference, name, a):
        return False
    return not is_float(a.dtype) or x.max() == 1 or _is_added_to_scores(reference, name, a)


def parameter_name(reference: Reference, name: str) -> str:
    """Return the name of the parameter to which the reference's call binds an input."""
    if not name.isdigit():
        return name
    call = reference.call or reference.module.forward
    try:
        names = [p.name for p in inspect.signature(call).parameters.values() if p.kind in _BY_PLACE]
    except ValueError:  # a call written in C has no signature
        return name
    at = int(name) + bool(reference.call)  # a call takes the module first
    return names[at] if at < len(names) else name


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_MASK_NAMES = ("mask", "allowed", "keep")


def _hides_some(reference: Reference, name: str, a: np.ndarray) -> bool:
    """Return whether one of an input's two values shows keys, and the other hides them.

    If all segment ids, or positions, are the same number, it shows every key, whichever it is.
    """
    given = hidden_keys(reference)
    one, other = sorted(
        hidden_keys(with_inputs(reference, {name: np.full_like(a, end)})) for end in _ends(a)
    )
    return one < given < other


def _hides(reference: Reference, name: str, a: np.ndarray) -> bool:
    """Return whether more keys get no weight if every other element is inverted."""
    hides, shows = _ends(a)
    turned = a.copy()
    turned.flat[::2] = hides if a.flat[0] == shows else shows
    as_given, as_turned = (hidden_keys(with_inputs(reference, {name: x})) for x in (a, turned))
    return as_given < as_turned


def _is_added_to_scores(reference: Reference, name: str, a: np.ndarray) -> bool:
    """Return whether adding one number to all of `a` changes no output, as it changes no softmax.

    A cache of zeros, concatenated with the keys, would also hide keys if its values were large.
    """
    both = (a, a - a.dtype.type(1))
    zero, shifted = (run_planted(with_inputs(reference, {name: x})) for x in both)
    if zero is None or shifted is None:
        return False
    others = shifted.kinds["output"]
    return all(same(others[key], want) for key, want in zero.kinds["output"].items())


def hidden_keys(reference: Reference) -> int:
    """Return how many weights of softmaxes are 0, or NaN as in a row without keys."""
    weightless = Weightless()
    run_planted(reference, Watched(weightless))
    return weightless.keys


def _ends(mask: np.ndarray) -> tuple[float, float]:
    """Return the values that hide and show a key; in a mask whose True hides, they are reversed."""
    if not is_float(mask.dtype) or (mask == 1).any():
        return 0, 1
    return max(float(ml_dtypes.finfo(mask.dtype).min), -1e38) / 2, 0  # the square is finite, too
