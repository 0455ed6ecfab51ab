"""Canaries: what the inputs of a check could not reveal, of the bugs that ports of attention have.

The reference itself, in float64, with one thing wrong, goes through the comparison in the port's
place: forward and, for the gradient's canary, backward. One that stays within the budget means
that a port with that bug would have passed on these inputs: such a check is INCONCLUSIVE. They
cost a run each, beside the perturbed runs of the budget.
"""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np

from jax_attn.parity.checking import wrong_softmax
from jax_attn.parity.checking.wrong_softmax import BACKWARD, Planted, Wrong, is_seen
from jax_attn.parity.run.inputs_and_runs import Inputs, Run, is_float, wide
from jax_attn.parity.run.reference import Reference
from jax_attn.parity.run.torch_modes import Float64

Found = tuple[list[str], list[str]]
"""Doubts and notes."""


@dataclass(frozen=True)
class Canary:
    """bug: what a port could have. why: what hides it. would: an input that would reveal it."""

    bug: str
    why: str
    would: str
    wrong: Wrong


_ALIKE = "the scores hardly differ from key to key, or the values do not"
_DRAWN = "inputs drawn at random, and several keys"
_NO_KEY = "no masked key matters"
_MASK = "a mask that hides some keys, whose scores and values differ from the others'"

# Planted in every softmax at once.
_EVERYWHERE = (
    Canary("weights that go to other keys", _ALIKE, _DRAWN, wrong_softmax.rolled),
    Canary(
        "a softmax over the queries",
        _ALIKE,
        f"T other than S, or {_DRAWN}",
        wrong_softmax.over_queries,
    ),
    Canary(
        "queries and heads mixed up",
        "T is the number of heads, and one is like the other",
        f"T other than N, or {_DRAWN}",
        wrong_softmax.mixed_axes,
    ),
    Canary("an ignored mask", _NO_KEY, _MASK, wrong_softmax.unmasked),
)

_FINE = Canary("a scale of the scores 1% too large", _ALIKE, _DRAWN, wrong_softmax.scaled(1.01))
_COARSE = Canary("a scale of the scores twice too large", _ALIKE, _DRAWN, wrong_softmax.scaled(2.0))
# As fine as the precision shows it.
_SCALES = {"float64": _FINE, "float32": _FINE, "float16": _COARSE, "bfloat16": _COARSE}
# Softmaxes that are tried alone: half as many runs as the budget's own, each forward only.
ALONE = 8


def tried(prepared: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(doubts, notes): each bug that would not have been seen, and what was not tried.

    prepared: the reference's side of the check, a `verdict.Prepared`.
    """
    found = _by_masks(prepared), _by_positions(prepared), _by_softmax(prepared)
    doubts, notes = (tuple(chain.from_iterable(lists)) for lists in zip(*found, strict=True))
    return doubts, notes


# --- softmaxes ------------------------------------------------------------------------------------


def _by_softmax(prepared: Any) -> Found:
    """Each canary everywhere; and in each softmax alone, lest one vouch for another."""
    scale = _SCALES[prepared.dtype]
    reference, unseen, moved, notes = prepared.reference, [], [], []
    for canary in (scale, *_EVERYWHERE):
        mode = Planted(canary.wrong)
        run = _run(reference, mode)
        if not mode.met:
            return [], ["no softmax was met: no canary of attention was tried"]
        if run is None:
            notes.append(f"the reference refuses weights that would show {canary.bug}")
            continue
        moved = moved or mode.moved  # the first has a place in each
        if mode.planted and not is_seen(prepared, run):
            unseen.append(canary)
    several = len(moved) > 1
    tried_alone = sorted(range(len(moved)), key=moved.__getitem__)[:ALONE] if several else []
    # At low precision what one layer of many adds may be a rounding: there any change will do.
    shows = is_seen if scale is _FINE else _changes
    suspects = [
        at
        for at in sorted(tried_alone)
        if (run := _run(reference, Planted(scale.wrong, at=at))) and not shows(prepared, run)
    ]
    suspects = suspects if several else [0] if unseen else []
    blind = [at for at in suspects if _reaches(prepared, at)]
    idle = [at for at in suspects if at not in blind]
    if unseen and not _reaches(prepared, None):
        unseen = []
    doubts = [_said(canary.bug, canary.why, canary.would) for canary in unseen]
    if several and blind and scale not in unseen:
        bug = f"{scale.bug} in {_places(blind, moved)} alone"
        doubts.append(_said(bug, scale.why, scale.would))
    if idle:
        notes.append(
            f"{_places(idle, moved)} only chooses or is not used: its weights reach no output, "
            "and their scale is not looked at"
        )
    if several and len(tried_alone) < len(moved):
        notes.append(f"of {len(moved)} softmaxes, {ALONE} were tried alone: those moved least")
    if prepared.gradients:
        mode = Planted(wrong_softmax.stopped, BACKWARD)
        run = reference.under(mode, prepared.cotangents)
        if mode.planted and not is_seen(prepared, run):
            doubts.append(_said("a gradient stopped at the scores", _ALIKE, _DRAWN))
    return doubts, notes


def _places(found: list[int], of: list) -> str:
    return f"softmax {', '.join(str(at + 1) for at in found)} of {len(of)}"


def _changes(prepared: Any, run: Run) -> bool:
    want = prepared.exact.kinds["output"]
    return any(not _same(got, want[name]) for name, got in run.kinds["output"].items())


def _reaches(prepared: Any, at: int | None) -> bool:
    """Whether an output is computed from the weights of this softmax, or of any; not chosen."""
    run = _run(prepared.reference, Planted(wrong_softmax.nowhere, at=at))
    want = prepared.exact.kinds["output"]
    return run is None or any(
        (np.isnan(got) & ~np.isnan(want[name])).any() for name, got in run.kinds["output"].items()
    )


# --- masks ----------------------------------------------------------------------------------------


def _by_masks(prepared: Any) -> Found:
    """Each mask among the inputs inverted, and ignored: all alike, of either polarity."""
    doubts, refused = [], {}
    for name, mask in _named(prepared.reference).items():
        if not _is_mask(prepared.reference, name, mask):
            continue
        hides, shows = _ends(mask)
        for bug, wrong in (
            ("inverted", np.where(mask == shows, hides, shows)),
            ("ignored", np.full_like(mask, shows)),
            ("ignored", np.full_like(mask, hides)),  # of the other polarity
        ):
            run = _run(_given(prepared.reference, name, wrong), Float64())
            if run is None:
                refused[f"mask {name!r}: the reference refuses one that would show it {bug}"] = None
            elif not is_seen(prepared, run):
                first = mask.flat[0]
                why = f"it is {first} everywhere" if (mask == first).all() else _NO_KEY
                doubts.append(_said(f"that mask {name!r} is {bug}", why, _MASK))
                break
    return doubts, list(refused)


def _is_mask(reference: Reference, name: str, a: np.ndarray) -> bool:
    """Booleans; by its name, also 0 and 1, or what is added to the scores; else by what it does.

    Of the last kind only one that is alike everywhere: what hides a key is met at the softmax.
    """
    if a.size == 0 or a.dtype == bool:
        return a.size > 0
    x = wide({"": a})[""]
    fits = np.isin(x, (0, 1)).all() or (is_float(a.dtype) and (x <= 0).all())
    if not fits or any(word in name.lower() for word in _NAMES):
        return bool(fits)
    return x.min() == x.max() in (0, 1) and _hides(reference, name, a)


_NAMES = ("mask", "allowed", "keep")


def _hides(reference: Reference, name: str, a: np.ndarray) -> bool:
    """Whether keys lose their whole weight where every other element is turned."""
    hides, shows = _ends(a)
    turned = a.copy()
    turned.flat[::2] = hides if a.flat[0] == shows else shows
    hidden = []

    def count(scores, axis):
        hidden[-1] += int((scores.softmax(axis) == 0).sum())

    for given in (a, turned):
        hidden.append(0)
        _run(_given(reference, name, given), Planted(count))
    return hidden[0] < hidden[1]


def _ends(mask: np.ndarray) -> tuple[Any, Any]:
    """What hides a key and what shows it; the reverse, where True hides."""
    if not is_float(mask.dtype) or (mask == 1).any():
        return 0, 1
    return max(float(ml_dtypes.finfo(mask.dtype).min), -1e38) / 2, 0  # the square is finite, too


# --- positions ------------------------------------------------------------------------------------


def _by_positions(prepared: Any) -> Found:
    """Inputs alike along an axis on which what is joined cannot be told: it needs no softmax."""
    doubts = []
    for name, x in _named(prepared.reference).items():
        for axis in range(x.ndim - 1) if is_float(x.dtype) else ():
            alike = x.shape[axis] > 1 and (x == x.take([0], axis)).all()
            if alike and _joins(prepared, name, x, axis):
                why = f"{name!r} is alike along its axis {axis}, and so is what comes out"
                doubts.append(_said("which positions are joined, and how", why, _DRAWN))
    return doubts, []


def _joins(prepared: Any, name: str, x: np.ndarray, axis: int) -> bool:
    """Whether the first position moves the others of an output that is alike along the axis."""
    moved = np.moveaxis(x.copy(), axis, 0)
    moved[0] = np.random.default_rng(prepared.seed).standard_normal(moved[0].shape)
    run = _run(_given(prepared.reference, name, np.moveaxis(moved, 0, axis)), Float64())
    for output, want in prepared.exact.kinds["output"].items() if run else ():
        got = run.kinds["output"][output]
        if got.shape != want.shape or want.shape[axis : axis + 1] != moved.shape[:1]:
            continue
        got, want = np.moveaxis(got, axis, 0), np.moveaxis(want, axis, 0)
        if _same(want, want[:1]) and not _same(got[1:], want[1:]):
            return True
    return False


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """To half of float64's digits of b's largest: roundings take far fewer, a bug far more."""
    largest = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    return np.allclose(a, b, rtol=0, atol=np.finfo(np.float64).eps ** 0.5 * largest, equal_nan=True)


# --- other inputs ---------------------------------------------------------------------------------


def _named(reference: Reference) -> dict[str, np.ndarray]:
    inputs = reference.inputs
    return inputs.named(inputs.args, inputs.kwargs)


def _given(reference: Reference, name: str, value: np.ndarray) -> Reference:
    """The same reference with one input another."""
    inputs = reference.inputs
    value = value.astype(_named(reference)[name].dtype)
    args = tuple(value if str(i) == name else a for i, a in enumerate(inputs.args))
    kwargs = {k: value if k == name else a for k, a in inputs.kwargs.items()}
    return replace(reference, inputs=Inputs(args, kwargs))


def _run(reference: Reference, mode: Float64) -> Run | None:
    """Its outputs; None where it refuses what is planted, by whatever error is its own."""
    try:
        return reference.under(mode, {})
    except Exception:
        return None


def _said(bug: str, why: str, would: str) -> str:
    return f"blind: these inputs would not reveal {bug}: {why}; what would: {would}"
