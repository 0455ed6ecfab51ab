"""Softmaxes gone wrong: a float64 run of torch with a bug planted where it weighs keys.

A wrong softmax takes the scores and the axis of the softmax and gives wrong probabilities, or None
where the bug has no place.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.run.inputs_and_runs import Run
from jax_attn.parity.run.torch_modes import SOFTMAXES, Float64

Wrong = Callable[[Tensor, int], Tensor | None]

FORWARD = (*SOFTMAXES, "_log_softmax")
BACKWARD = ("_softmax_backward_data", "_log_softmax_backward_data")


def scaled(by: float) -> Wrong:
    return lambda scores, axis: torch.softmax(by * scores, axis)


def rolled(scores: Tensor, axis: int) -> Tensor:
    return torch.softmax(scores, axis).roll(1, dims=axis)


def _is_last(scores: Tensor, axis: int) -> bool:
    return axis in (-1, scores.ndim - 1)


def _square(scores: Tensor, axis: int) -> bool:
    """Whether it is as long as the axis before it, and not 1."""
    return scores.ndim > 1 and scores.shape[axis] == scores.shape[axis - 1] > 1


def over_queries(scores: Tensor, axis: int) -> Tensor | None:
    """Over the other axis, where it is as long: the shapes would not show it."""
    if not _is_last(scores, axis) or not _square(scores, -1):
        return None
    made = torch.softmax(scores, -2)
    return made.masked_fill(made.isnan(), 0.0)


def mixed_axes(scores: Tensor, axis: int) -> Tensor | None:
    """(B, T, N, S) taken for (B, N, T, S), where the shapes would not show it."""
    if not _is_last(scores, axis) or scores.ndim < 4 or not _square(scores, -2):
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
    """Float64, every softmax gone wrong, or those of place `at` alone.

    A place is the n-th softmax of a module's call, in all calls: a module has its bug however
    often it is called. Outside of any module each softmax is one. met: how many softmaxes there
    were; planted: in how many the bug had a place. moved: by how much those of each place moved,
    all their elements together.
    """

    def __init__(self, wrong: Wrong, where: tuple[str, ...] = FORWARD, at: int | None = None):
        super().__init__()
        self.wrong, self.where, self.at = wrong, where, at
        self.met, self.planted, self.moved = 0, 0, []
        self._within: list[list[Any]] = []  # modules, and how many softmaxes each call had so far
        self._places: dict[Any, int] = {}

    def __enter__(self):
        self._hooks = (
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        )
        return super().__enter__()

    def __exit__(self, *raised):
        for hook in self._hooks:
            hook.remove()
        return super().__exit__(*raised)

    def _entered(self, module, _) -> None:
        self._within.append([module, 0])

    def _left(self, *_) -> None:
        self._within.pop()

    def compute(self, func, args, kwargs):
        right = super().compute(func, args, kwargs)
        name = func.overloadpacket.__name__
        if name not in self.where:
            return right
        self.met += 1
        place: Any = self.met
        if self._within:
            place = tuple(self._within[-1])
            self._within[-1][1] += 1
        at = self._places.setdefault(place, len(self._places))
        self.moved += [0.0] * (at == len(self.moved))
        made = self.wrong(*args[:2]) if self.at in (None, at) else None
        if made is None:
            return right
        made = made.log() if name == "_log_softmax" else made
        if name in FORWARD:  # a row of -inf alone is as it was: it would show any bug
            made = torch.where(args[0].isneginf().all(args[1], keepdim=True), right, made)
        self.planted += 1
        self.moved[at] += float((made - right).nan_to_num().abs().sum())
        return made


def is_seen(prepared: Any, wrong: Run) -> bool:
    """Whether the comparison of a `verdict.Prepared` fails it in the port's place."""
    return any(
        prepared.judge_one(kind, name, "planted", got).verdict is Verdict.FAIL
        for kind, tensors in wrong.kinds.items()
        for name, got in tensors.items()
    )
