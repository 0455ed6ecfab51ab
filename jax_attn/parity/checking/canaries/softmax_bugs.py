"""Bugs of a softmax, and a float64 torch mode that plants one in the softmaxes over keys."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from jax_attn.parity.checking.canaries.places import Place, Placed
from jax_attn.parity.run.modes.constants import SOFTMAXES

SoftmaxBug = Callable[..., Tensor | None]
"""(scores, axis) -> wrong probabilities; None if the bug does not apply. In the backward pass:
(gradient of the probabilities, probabilities) -> wrong gradient of the scores."""

FORWARD = (*SOFTMAXES, "_log_softmax")
BACKWARD = ("_softmax_backward_data", "_log_softmax_backward_data")


def scaled(by: float) -> SoftmaxBug:
    return lambda scores, axis: torch.softmax(by * scores, axis)


def rolled(scores: Tensor, axis: int) -> Tensor:
    return torch.softmax(scores, axis).roll(1, dims=axis)


def _is_last(scores: Tensor, axis: int) -> bool:
    return axis in (-1, scores.ndim - 1)


def _square(scores: Tensor, axis: int) -> bool:
    """Return whether the axis is as long as the one before it, and longer than 1."""
    return scores.ndim > 1 and scores.shape[axis] == scores.shape[axis - 1] > 1


def over_queries(scores: Tensor, axis: int) -> Tensor | None:
    """Return a softmax over the queries; None unless T = S, where no shape shows the bug."""
    if not _is_last(scores, axis) or not _square(scores, -1):
        return None
    weights = torch.softmax(scores, -2)
    return weights.masked_fill(weights.isnan(), 0.0)


def mixed_axes(scores: Tensor, axis: int) -> Tensor | None:
    """Read scores (B, N, T, S) as (B, T, N, S); None unless T = N, where no shape shows the bug."""
    if not _is_last(scores, axis) or scores.ndim < 4 or not _square(scores, -2):
        return None
    return torch.softmax(scores, axis).transpose(-3, -2)


def unmasked(scores: Tensor, axis: int) -> Tensor | None:
    """Give hidden keys the mean score of the visible ones; None if no key is hidden."""
    hidden = torch.softmax(scores, axis) == 0
    if not hidden.any():
        return None
    seen = (~hidden).sum(axis, keepdim=True).clamp(min=1)
    mean = scores.masked_fill(hidden, 0.0).sum(axis, keepdim=True) / seen
    return torch.softmax(torch.where(hidden, mean, scores), axis)


def _last_visible(scores: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return the index of each row's last key with weight, or -1, and the number of such keys."""
    visible = torch.softmax(scores, axis) > 0
    shape = [1] * scores.ndim
    shape[axis] = -1
    index = torch.arange(scores.shape[axis]).view(shape)
    last = torch.where(visible, index, -1).amax(axis, keepdim=True)
    return last, visible.sum(axis, keepdim=True)


def one_key_more(scores: Tensor, axis: int) -> Tensor | None:
    """Show the key after the last visible one of each row, with the same score."""
    last, visible = _last_visible(scores, axis)
    rows = (visible > 0) & (last < scores.shape[axis] - 1)
    if not rows.any():
        return None
    after = torch.where(rows, last + 1, 0)
    shown = scores.scatter(axis, after, scores.gather(axis, last.clamp(min=0)))
    return torch.softmax(torch.where(rows, shown, scores), axis)


def one_key_less(scores: Tensor, axis: int) -> Tensor | None:
    """Hide the last visible key of each row too, unless it is the only one or the last key."""
    last, visible = _last_visible(scores, axis)
    rows = (visible > 1) & (last < scores.shape[axis] - 1)
    if not rows.any():
        return None
    hidden = scores.scatter(axis, last.clamp(min=0), -torch.inf)
    return torch.softmax(torch.where(rows, hidden, scores), axis)


def at_the_start(bug: SoftmaxBug) -> SoftmaxBug:
    """Return the same bug at the first keys of a row instead of the last ones."""

    def flipped(scores: Tensor, axis: int) -> Tensor | None:
        wrong = bug(scores.flip(axis), axis)
        return None if wrong is None else wrong.flip(axis)

    return flipped


def narrow(scores: Tensor, axis: int) -> Tensor:
    return torch.softmax(scores, axis).bfloat16().double()


def nowhere(scores: Tensor, axis: int) -> Tensor:
    """Return NaN, which spreads to everything computed from the probabilities, even times zero."""
    return torch.full_like(scores, torch.nan)


def stopped(d_weights: Tensor, weights: Tensor) -> Tensor:
    """Return a zero gradient of the scores; for the backward pass."""
    return torch.zeros_like(weights)


class BuggySoftmax(Placed):
    """Float64 with a bug planted in every softmax, or in those of one `Place`.

    met: the number of softmaxes computed. planted: the number of those with the bug. moved: for
    each place, how much the bug changes the probabilities, summed over all elements.
    """

    def __init__(
        self, bug: SoftmaxBug, operators: tuple[str, ...] = FORWARD, place: int | None = None
    ):
        """operators: the softmaxes that count. place: the only one with the bug; None for all."""
        super().__init__()
        self.bug, self.operators, self.place = bug, operators, place
        self.met, self.planted = 0, 0
        self.moved: list[float] = []
        self._places: dict[Place, int] = {}

    def compute(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        right = super().compute(func, args, kwargs)
        name = func.overloadpacket.__name__
        if name not in self.operators:
            return right
        self.met += 1
        place = self._place_met()
        wrong = self.bug(*args[:2]) if self.place in (None, place) else None
        if wrong is None:
            return right
        wrong = wrong.log() if name == "_log_softmax" else wrong
        if name in FORWARD:  # a row that is all -inf keeps its result, which would show any bug
            wrong = torch.where(args[0].isneginf().all(args[1], keepdim=True), right, wrong)
        self.planted += 1
        self.moved[place] += float((wrong - right).nan_to_num().abs().sum())
        return wrong

    def _place_met(self) -> int:
        """Return the index of the current softmax's place."""
        place = self._places.setdefault(self.place_met("softmax"), len(self._places))
        if place == len(self.moved):
            self.moved.append(0.0)
        return place
