"""Softmaxes gone wrong: a float64 run of torch with a bug planted where it weighs keys.

A wrong softmax takes the scores and the axis of the softmax and gives wrong probabilities, or None
where the bug has no place.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jax_attn.parity.compare import Verdict
from jax_attn.parity.perturbed import SOFTMAXES, Float64
from jax_attn.parity.signature import Run

Wrong = Callable[[Tensor, int], Tensor | None]

FORWARD = (*SOFTMAXES, "_log_softmax")
BACKWARD = ("_softmax_backward_data", "_log_softmax_backward_data")


def scaled(by: float) -> Wrong:
    return lambda scores, axis: torch.softmax(by * scores, axis)


def rolled(scores: Tensor, axis: int) -> Tensor:
    return torch.softmax(scores, axis).roll(1, dims=axis)


def over_queries(scores: Tensor, axis: int) -> Tensor | None:
    """Over the other axis, where it is as long: the shapes would not show it."""
    if scores.ndim < 2 or scores.shape[-1] != scores.shape[-2] or scores.shape[-1] < 2:
        return None
    made = torch.softmax(scores, -2)
    return made.masked_fill(made.isnan(), 0.0)


def mixed_axes(scores: Tensor, axis: int) -> Tensor | None:
    """(B, T, N, S) taken for (B, N, T, S), where the shapes would not show it."""
    if scores.ndim < 4 or scores.shape[-3] != scores.shape[-2] or scores.shape[-2] < 2:
        return None
    return torch.softmax(scores, axis).transpose(-3, -2)


def unmasked(scores: Tensor, axis: int) -> Tensor | None:
    """What is hidden scores as the others do on average; None where nothing is."""
    hidden = torch.softmax(scores, axis) == 0
    if not hidden.any():
        return None
    seen = (~hidden).sum(axis, keepdim=True).clamp(min=1)
    mean = scores.masked_fill(hidden, 0.0).sum(axis, keepdim=True) / seen
    return torch.softmax(torch.where(hidden, mean, scores), axis)


def narrow(scores: Tensor, axis: int) -> Tensor:
    return torch.softmax(scores, axis).bfloat16().double()


def nowhere(scores: Tensor, axis: int) -> Tensor:
    """NaN: it reaches whatever is computed from the probabilities, be it times zero."""
    return torch.full_like(scores, torch.nan)


def stopped(d_weights: Tensor, weights: Tensor) -> Tensor:
    """Of a backward pass: no gradient goes on to the scores."""
    return torch.zeros_like(weights)


class Planted(Float64):
    """Float64, every softmax gone wrong, or the one at place `at` alone.

    met: how many there were. planted: in how many the bug had a place. moved: by how much each
    of those moved, all its elements together.
    """

    def __init__(self, wrong: Wrong, where: tuple[str, ...] = FORWARD, at: int | None = None):
        super().__init__()
        self.wrong, self.where, self.at = wrong, where, at
        self.met, self.moved = 0, []

    @property
    def planted(self) -> int:
        return len(self.moved)

    def compute(self, func, args, kwargs):
        right = super().compute(func, args, kwargs)
        name = func.overloadpacket.__name__
        if name not in self.where:
            return right
        self.met += 1
        made = self.wrong(*args[:2]) if self.at in (None, self.met - 1) else None
        if made is None:
            return right
        made = made.log() if name == "_log_softmax" else made
        if name in FORWARD:  # a row of -inf alone is as it was: it would show any bug
            made = torch.where(args[0].isneginf().all(args[1], keepdim=True), right, made)
        self.moved.append(float((made - right).nan_to_num().abs().sum()))
        return made


def is_seen(prepared: Any, wrong: Run) -> bool:
    """Whether the comparison of a `verdict.Prepared` fails it in the port's place."""
    return any(
        prepared.judge_one(kind, name, "planted", got).verdict is Verdict.FAIL
        for kind, tensors in wrong.kinds.items()
        for name, got in tensors.items()
    )
