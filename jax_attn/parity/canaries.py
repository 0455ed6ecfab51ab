"""Canaries: what the inputs of a check could not reveal, of the bugs that ports of attention have.

The reference itself, in float64, with one thing wrong, goes through the comparison in the port's
place: forward and, for the gradient's canary, backward. One that stays within the budget means
that a port with that bug would have passed on these inputs: such a check is INCONCLUSIVE. They
cost a run each, beside the perturbed runs of the budget.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jax_attn.parity.compare import Verdict
from jax_attn.parity.perturbed import SOFTMAXES, Float64
from jax_attn.parity.signature import Inputs, Run, is_float, wide

Wrong = Callable[[Tensor, int], Tensor | None]
"""Scores and the axis of the softmax -> wrong probabilities; None where the bug has no place."""


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


def _scaled(by: float) -> Wrong:
    return lambda scores, axis: torch.softmax(by * scores, axis)


def _rolled(scores: Tensor, axis: int) -> Tensor:
    return torch.softmax(scores, axis).roll(1, dims=axis)


def _other_axis(scores: Tensor, axis: int) -> Tensor | None:
    """Over the queries, where there are as many as keys: the shapes would not show it."""
    if scores.ndim < 2 or scores.shape[-1] != scores.shape[-2] or scores.shape[-1] < 2:
        return None
    made = torch.softmax(scores, -2)
    return made.masked_fill(made.isnan(), 0.0)


def _mixed_axes(scores: Tensor, axis: int) -> Tensor | None:
    """(B, T, N, S) taken for (B, N, T, S), where the shapes would not show it."""
    if scores.ndim < 4 or scores.shape[-3] != scores.shape[-2] or scores.shape[-2] < 2:
        return None
    return torch.softmax(scores, axis).transpose(-3, -2)


def _unmasked(scores: Tensor, axis: int) -> Tensor | None:
    """What is masked scores as the others do on average."""
    hidden = torch.softmax(scores, axis) == 0
    if not hidden.any():
        return None
    seen = (~hidden).sum(axis, keepdim=True).clamp(min=1)
    mean = scores.masked_fill(hidden, 0.0).sum(axis, keepdim=True) / seen
    return torch.softmax(torch.where(hidden, mean, scores), axis)


# By 1% where the precision shows it, else doubled.
_SCALES = {"float64": 1.01, "float32": 1.01, "float16": 2.0, "bfloat16": 2.0}


def _forward(dtype: str) -> tuple[Canary, ...]:
    by = _SCALES[dtype]
    said = "twice too large" if by == 2 else f"{by - 1:.0%} too large"
    return (
        Canary(f"a scale of the scores {said}", _ALIKE, _DRAWN, _scaled(by)),
        Canary("weights that go to other keys", _ALIKE, _DRAWN, _rolled),
        Canary("a softmax over the queries", _ALIKE, f"T other than S, or {_DRAWN}", _other_axis),
        Canary(
            "queries and heads mixed up",
            "T is the number of heads, and one is like the other",
            f"T other than N, or {_DRAWN}",
            _mixed_axes,
        ),
        Canary(
            "an ignored mask",
            _NO_KEY,
            _MASK,
            _unmasked,
        ),
    )


class _Planted(Float64):
    """Float64, every softmax gone wrong."""

    def __init__(self, wrong: Wrong):
        super().__init__()
        self.wrong, self.softmaxes, self.planted = wrong, 0, 0

    def compute(self, func, args, kwargs):
        right = super().compute(func, args, kwargs)
        if func.overloadpacket.__name__ not in SOFTMAXES:
            return right
        made = self.wrong(*args[:2])
        self.softmaxes += 1
        self.planted += made is not None
        return right if made is None else made


class _Stopped(Float64):
    """Float64, no gradient through any softmax."""

    def __init__(self):
        super().__init__()
        self.planted = 0

    def compute(self, func, args, kwargs):
        right = super().compute(func, args, kwargs)
        if func.overloadpacket.__name__ != "_softmax_backward_data":
            return right
        self.planted += 1
        return torch.zeros_like(right)


def tried(prepared: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(doubts, notes): each bug that would not have been seen, and what was not tried.

    prepared: the reference's side of the check, a `verdict.Prepared`.
    """
    softmaxes, doubts = _by_softmax(prepared)
    notes = () if softmaxes else ("no softmax was met: no canary of attention was tried",)
    return (*_by_masks(prepared), *doubts), notes


def _by_softmax(prepared: Any) -> tuple[int, list[str]]:
    """How many there are in a forward pass, and what would not have been seen."""
    doubts = []
    for canary in _forward(prepared.dtype):
        mode = _Planted(canary.wrong)
        run = prepared.reference.under(mode, {})
        if not mode.softmaxes:
            return 0, []
        if mode.planted and not _seen(prepared, run):
            doubts.append(_said(canary.bug, canary.why, canary.would))
    softmaxes = mode.softmaxes
    if prepared.gradients:
        mode = _Stopped()
        run = prepared.reference.under(mode, prepared.cotangents)
        if mode.planted and not _seen(prepared, run):
            doubts.append(_said("a gradient stopped at the scores", _ALIKE, _DRAWN))
    return softmaxes, doubts


def _by_masks(prepared: Any) -> Iterator[str]:
    """Each mask among the inputs inverted, and ignored: all alike, of either polarity."""
    reference = prepared.reference
    inputs = reference.inputs
    for name, mask in inputs.named(inputs.args, inputs.kwargs).items():
        if not _is_mask(name, mask):
            continue
        hides, shows = _ends(mask)
        for bug, wrong in (
            ("inverted", np.where(mask == shows, hides, shows)),
            ("ignored", np.full_like(mask, shows)),
            ("ignored", np.full_like(mask, hides)),  # of the other polarity
        ):
            changed = replace(reference, inputs=_with(inputs, name, wrong.astype(mask.dtype)))
            if not _seen(prepared, changed.exact({})):
                first = mask.flat[0]
                why = f"it is {first} everywhere" if (mask == first).all() else _NO_KEY
                yield _said(f"that mask {name!r} is {bug}", why, _MASK)
                break


def _is_mask(name: str, a: np.ndarray) -> bool:
    """Booleans; by its name, also 0 and 1, or what is added to the scores."""
    if a.size == 0:
        return False
    if a.dtype == bool:
        return True
    fits = wide({"": a})[""] <= 0 if is_float(a.dtype) else np.isin(a, (0, 1))
    return "mask" in name and bool(fits.all())


def _ends(mask: np.ndarray) -> tuple[Any, Any]:
    """What hides a key and what shows it; the reverse, where True hides."""
    return (np.finfo(np.float32).min / 2, 0) if is_float(mask.dtype) else (0, 1)


def _with(inputs: Inputs, name: str, value: np.ndarray) -> Inputs:
    args = tuple(value if str(i) == name else a for i, a in enumerate(inputs.args))
    kwargs = {k: value if k == name else a for k, a in inputs.kwargs.items()}
    return Inputs(args, kwargs)


def _seen(prepared: Any, wrong: Run) -> bool:
    """Whether the comparison fails it."""
    kinds: Mapping[str, Mapping[str, np.ndarray]] = wrong.kinds
    return any(
        prepared.judge_one(kind, name, "canary", got).verdict is Verdict.FAIL
        for kind, tensors in kinds.items()
        for name, got in tensors.items()
    )


def _said(bug: str, why: str, would: str) -> str:
    return f"blind: these inputs would not reveal {bug}: {why}; what would: {would}"
