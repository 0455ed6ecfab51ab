"""Canaries: what the inputs of a check could not reveal, of the bugs that ports of attention have.

The reference itself, in float64 and with one bug planted, goes through the comparison in the
port's place: forward and, for the gradient's canary, backward. If it stays within the budget, a
port with that bug would pass on these inputs, and the check is INCONCLUSIVE. A canary costs one
run, beside the perturbed runs of the budget.
"""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jax_attn.parity.checking import softmax_bugs
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.checking.softmax_bugs import BACKWARD, BuggySoftmax, SoftmaxBug
from jax_attn.parity.run.float64_mode import Float64
from jax_attn.parity.run.inputs_and_runs import Inputs, Run, is_float, wide
from jax_attn.parity.run.reference import Reference


class DoubtsAndNotes(NamedTuple):
    """Bugs that would not be seen; what was not tried."""

    doubts: tuple[str, ...]
    notes: tuple[str, ...]


def try_canaries(prepared: Prepared) -> DoubtsAndNotes:
    """Plant each canary in the reference, and doubt the inputs that do not reveal it."""
    parts = _try_masks(prepared), _try_positions(prepared), _try_softmaxes(prepared)
    doubts, notes = (tuple(chain.from_iterable(lines)) for lines in zip(*parts, strict=True))
    return DoubtsAndNotes(doubts, notes)


def _doubt(bug: str, reason: str, remedy: str) -> str:
    return f"blind: these inputs would not reveal {bug}: {reason}; what would: {remedy}"


# --- softmaxes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Canary:
    """name: of a bug that ports have. reason: what hides it. remedy: inputs that reveal it."""

    name: str
    reason: str
    remedy: str
    bug: SoftmaxBug

    @property
    def doubt(self) -> str:
        return _doubt(self.name, self.reason, self.remedy)


_ALIKE = "the scores hardly differ from key to key, or the values do not"
_DRAWN = "inputs drawn at random, and several keys"
_NO_KEY = "no masked key matters"
_MASK = "a mask that hides some keys, whose scores and values differ from the others'"

# Planted in every softmax at once.
_EVERYWHERE = (
    Canary("weights that go to other keys", _ALIKE, _DRAWN, softmax_bugs.rolled),
    Canary(
        "a softmax over the queries",
        _ALIKE,
        f"T other than S, or {_DRAWN}",
        softmax_bugs.over_queries,
    ),
    Canary(
        "queries and heads mixed up",
        "T is the number of heads, and one is like the other",
        f"T other than N, or {_DRAWN}",
        softmax_bugs.mixed_axes,
    ),
    Canary("an ignored mask", _NO_KEY, _MASK, softmax_bugs.unmasked),
)
_STOPPED = Canary("a gradient stopped at the scores", _ALIKE, _DRAWN, softmax_bugs.stopped)
_FINE = Canary("a scale of the scores 1% too large", _ALIKE, _DRAWN, softmax_bugs.scaled(1.01))
_COARSE = Canary("a scale of the scores twice too large", _ALIKE, _DRAWN, softmax_bugs.scaled(2.0))
# As fine as the precision shows it. Planted everywhere, and in one softmax at a time.
_SCALES = {"float64": _FINE, "float32": _FINE, "float16": _COARSE, "bfloat16": _COARSE}
# Softmaxes that are tried alone: half as many runs as the budget's own, each forward only.
ALONE = 8


def _try_softmaxes(prepared: Prepared) -> DoubtsAndNotes:
    """Each canary everywhere; the scale also in each softmax alone, lest one vouch for another."""
    scale = _SCALES[prepared.dtype]
    unseen: list[Canary] = []
    moved: list[float] = []
    notes: list[str] = []
    for canary in (scale, *_EVERYWHERE):
        mode = BuggySoftmax(canary.bug)
        run = _run(prepared.reference, mode)
        if not mode.met:
            return DoubtsAndNotes((), ("no softmax was met: no canary of attention was tried",))
        if run is None:
            notes.append(f"the reference refuses weights that would show {canary.name}")
            continue
        moved = moved or mode.moved  # the scale, which comes first, has a place in each
        if mode.planted and not prepared.would_fail(run):
            unseen.append(canary)
    doubts = [canary.doubt for canary in unseen] if unseen and _reaches(prepared, None) else []
    several = len(moved) > 1
    suspects = _unseen_alone(prepared, scale, moved) if several else [0] if unseen else []
    blind = [place for place in suspects if _reaches(prepared, place)]
    if several and blind and scale.doubt not in doubts:
        doubts.append(replace(scale, name=f"{scale.name} in {_places(blind, moved)} alone").doubt)
    if idle := [place for place in suspects if place not in blind]:
        notes.append(
            f"{_places(idle, moved)} only chooses or is not used: its weights reach no output, "
            "and their scale is not looked at"
        )
    if len(moved) > ALONE:
        notes.append(f"of {len(moved)} softmaxes, {ALONE} were tried alone: those moved least")
    if prepared.gradients:
        mode = BuggySoftmax(_STOPPED.bug, BACKWARD)
        run = prepared.reference.under(mode, prepared.cotangents)
        if mode.planted and not prepared.would_fail(run):
            doubts.append(_STOPPED.doubt)
    return DoubtsAndNotes(tuple(doubts), tuple(notes))


def _unseen_alone(prepared: Prepared, scale: Canary, moved: list[float]) -> list[int]:
    """The places where the scale's bug, planted there alone, is not seen; those moved least."""
    # At low precision what one layer of many adds may be a rounding: there any change will do.
    shows = Prepared.would_fail if scale is _FINE else _changes_outputs
    least_moved = sorted(range(len(moved)), key=moved.__getitem__)[:ALONE]
    return [
        place
        for place in sorted(least_moved)
        if (run := _run(prepared.reference, BuggySoftmax(scale.bug, place=place)))
        and not shows(prepared, run)
    ]


def _places(places: list[int], moved: list[float]) -> str:
    return f"softmax {', '.join(str(place + 1) for place in places)} of {len(moved)}"


def _changes_outputs(prepared: Prepared, run: Run) -> bool:
    want = prepared.exact.kinds["output"]
    return any(not _same(got, want[name]) for name, got in run.kinds["output"].items())


def _reaches(prepared: Prepared, place: int | None) -> bool:
    """Whether an output is computed from the weights of this softmax, or of any; not chosen."""
    run = _run(prepared.reference, BuggySoftmax(softmax_bugs.nowhere, place=place))
    want = prepared.exact.kinds["output"]
    return run is None or any(
        (np.isnan(got) & ~np.isnan(want[name])).any() for name, got in run.kinds["output"].items()
    )


# --- masks ----------------------------------------------------------------------------------------


def _try_masks(prepared: Prepared) -> DoubtsAndNotes:
    """Each mask among the inputs inverted, and ignored: all alike, of either polarity."""
    doubts = []
    refused: dict[str, None] = {}
    for name, mask in _named_inputs(prepared.reference).items():
        if not _is_mask(prepared.reference, name, mask):
            continue
        hides, shows = _ends(mask)
        for bug, wrong_mask in (
            ("inverted", np.where(mask == shows, hides, shows)),
            ("ignored", np.full_like(mask, shows)),
            ("ignored", np.full_like(mask, hides)),  # of the other polarity
        ):
            run = _run(_with_input(prepared.reference, name, wrong_mask), Float64())
            if run is None:
                refused[f"mask {name!r}: the reference refuses one that would show it {bug}"] = None
            elif not prepared.would_fail(run):
                first = mask.flat[0]
                reason = f"it is {first} everywhere" if (mask == first).all() else _NO_KEY
                doubts.append(_doubt(f"that mask {name!r} is {bug}", reason, _MASK))
                break
    return DoubtsAndNotes(tuple(doubts), tuple(refused))


def _is_mask(reference: Reference, name: str, a: np.ndarray) -> bool:
    """Booleans are; 0 and 1, or what is added to the scores, are by their name or what they do.

    Without a mask's name only one that is alike everywhere is: what hides a key is met at the
    softmax.
    """
    if a.size == 0 or a.dtype == bool:
        return a.size > 0
    x = wide({"": a})[""]
    fits = np.isin(x, (0, 1)).all() or (is_float(a.dtype) and (x <= 0).all())
    if not fits or any(word in name.lower() for word in _MASK_NAMES):
        return bool(fits)
    return x.min() == x.max() in (0, 1) and _hides(reference, name, a)


_MASK_NAMES = ("mask", "allowed", "keep")


def _hides(reference: Reference, name: str, a: np.ndarray) -> bool:
    """Whether more keys have no weight where every other element is turned."""
    hides, shows = _ends(a)
    turned = a.copy()
    turned.flat[::2] = hides if a.flat[0] == shows else shows
    as_given, as_turned = (_hidden_keys(_with_input(reference, name, x)) for x in (a, turned))
    return as_given < as_turned


def _hidden_keys(reference: Reference) -> int:
    hidden = 0

    def count(scores: Any, axis: int) -> None:
        nonlocal hidden
        hidden += int((scores.softmax(axis) == 0).sum())

    _run(reference, BuggySoftmax(count))
    return hidden


def _ends(mask: np.ndarray) -> tuple[float, float]:
    """What hides a key and what shows it; the reverse, where True hides."""
    if not is_float(mask.dtype) or (mask == 1).any():
        return 0, 1
    return max(float(ml_dtypes.finfo(mask.dtype).min), -1e38) / 2, 0  # the square is finite, too


# --- positions ------------------------------------------------------------------------------------


def _try_positions(prepared: Prepared) -> DoubtsAndNotes:
    """Inputs alike along an axis, where joins cannot be told apart: no softmax is needed."""
    doubts = []
    for name, x in _named_inputs(prepared.reference).items():
        for axis in range(x.ndim - 1) if is_float(x.dtype) else ():
            alike = x.shape[axis] > 1 and (x == x.take([0], axis)).all()
            if alike and _joins(prepared, name, x, axis):
                reason = f"{name!r} is alike along its axis {axis}, and so is what comes out"
                doubts.append(_doubt("which positions are joined, and how", reason, _DRAWN))
    return DoubtsAndNotes(tuple(doubts), ())


def _joins(prepared: Prepared, name: str, x: np.ndarray, axis: int) -> bool:
    """Whether the first position moves the others of an output that is alike along the axis."""
    moved = np.moveaxis(x.copy(), axis, 0)
    moved[0] = np.random.default_rng(prepared.seed).standard_normal(moved[0].shape)
    run = _run(_with_input(prepared.reference, name, np.moveaxis(moved, 0, axis)), Float64())
    if run is None:
        return False
    for output, want in prepared.exact.kinds["output"].items():
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


# --- the reference with another input, or with a bug ----------------------------------------------


def _named_inputs(reference: Reference) -> dict[str, np.ndarray]:
    inputs = reference.inputs
    return inputs.named(inputs.args, inputs.kwargs)


def _with_input(reference: Reference, name: str, value: np.ndarray) -> Reference:
    """The same reference with one input another."""
    inputs = reference.inputs
    value = value.astype(_named_inputs(reference)[name].dtype)
    args = tuple(value if str(i) == name else a for i, a in enumerate(inputs.args))
    kwargs = {k: value if k == name else a for k, a in inputs.kwargs.items()}
    return replace(reference, inputs=Inputs(args, kwargs))


def _run(reference: Reference, mode: Float64) -> Run | None:
    """Its outputs; None where it refuses what is planted, by whatever error is its own."""
    try:
        return reference.under(mode, {})
    except Exception:
        return None
