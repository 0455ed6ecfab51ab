"""Bugs of a softmax over keys: what hides each of them, and inputs that reveal it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jax_attn.parity.bugs.bug import Bug, OperatorCall, Site
from jax_attn.parity.bugs.planting import Planted
from jax_attn.parity.run.modes.constants import SOFTMAXES

Weights = Callable[[Tensor, int], Tensor | None]
"""(scores, axis) -> wrong weights; None if the bug does not apply."""

FORWARD = (*SOFTMAXES, "_log_softmax")
_BACKWARD = ("_softmax_backward_data", "_log_softmax_backward_data")

DRAWN = "inputs drawn at random, and several keys"
NO_KEY = "the hidden keys would not change the outputs"
SOME_HIDDEN = "a mask that hides some keys, whose scores and values differ from the others'"


@dataclass(frozen=True)
class SoftmaxBug:
    """A bug in every softmax over keys.

    Attributes:
      name: its name in reports.
      says: the bug in words, "a softmax over the queries".
      weights: computes the wrong weights; in a backward pass, from (gradient of the weights,
        weights), the wrong gradient of the scores.
      kind: the kind of the doubt if inputs hide it; empty if that is not asked.
      hidden_by: what hides it, if that is not what the softmaxes themselves show.
      revealed_by: inputs that reveal it; "{}" stands for what reveals most bugs of a softmax.
      operators: those in which it is.
    """

    name: str
    says: str
    weights: Callable[..., Tensor | None]
    kind: str = ""
    hidden_by: str = ""
    revealed_by: str = "{}"
    operators: tuple[str, ...] = FORWARD

    @property
    def is_backward(self) -> bool:
        return self.operators is _BACKWARD

    def planted(self, at: Site | None = None) -> Planted:
        """Return a mode that plants it in every softmax, or in one."""
        return Planted(self.operators, self._of, at)

    def _of(self, call: OperatorCall) -> Bug | None:
        right = call.result()  # the operator may refuse its arguments
        if not right.ndim or not right.numel():
            return None
        wrong = self.weights(*call.args[:2])
        if wrong is None:
            return None
        wrong = wrong.log() if call.name == "_log_softmax" else wrong
        if not self.is_backward:
            # A row that is all -inf keeps its result, which would show any bug.
            empty = call.args[0].isneginf().all(call.args[1], keepdim=True)
            wrong = torch.where(empty, right, wrong)
        return Bug(self.name, self.says, lambda call: wrong)


def scaled(by: float) -> Weights:
    return lambda scores, axis: torch.softmax(by * scores, axis)


def rolled(scores: Tensor, axis: int) -> Tensor:
    return torch.softmax(scores, axis).roll(1, dims=axis)


def _is_last(scores: Tensor, axis: int) -> bool:
    return axis in (-1, scores.ndim - 1)


def _square(scores: Tensor, axis: int) -> bool:
    """Return whether the axis is as long as the one before it, and longer than 1."""
    return scores.ndim > 1 and scores.shape[axis] == scores.shape[axis - 1] > 1


def over_queries(scores: Tensor, axis: int) -> Tensor:
    """Return a softmax over the queries; 0 for a key that no query sees."""
    weights = torch.softmax(scores, -2)
    return weights.masked_fill(weights.isnan(), 0.0)


def _over_as_many_queries(scores: Tensor, axis: int) -> Tensor | None:
    """Return a softmax over the queries; None unless T = S, where no shape shows the bug."""
    is_hidden = _is_last(scores, axis) and _square(scores, -1)
    return over_queries(scores, axis) if is_hidden else None


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


def at_the_start(bug: Weights) -> Weights:
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


def _stopped(d_weights: Tensor, weights: Tensor) -> Tensor:
    """Return a zero gradient of the scores."""
    return torch.zeros_like(weights)


SCALE = SoftmaxBug(
    "scale 1% too large", "a scale of the scores 1% too large", scaled(1.01), "scale"
)
COARSE_SCALE = SoftmaxBug(
    "scale twice too large", "a scale of the scores twice too large", scaled(2.0), "scale"
)
OTHER_KEYS = SoftmaxBug("other keys", "weights that go to other keys", rolled, "other-keys")
OVER_QUERIES = SoftmaxBug(
    "softmax over the queries",
    "a softmax over the queries",
    _over_as_many_queries,
    "softmax-over-queries",
    revealed_by="T other than S, or {}",
)
MIXED_HEADS = SoftmaxBug(
    "queries and heads mixed up",
    "queries and heads mixed up",
    mixed_axes,
    "mixed-heads",
    "T is the number of heads, and the outputs are alike either way",
    "T other than N, or {}",
)
UNMASKED = SoftmaxBug(
    "mask ignored", "an ignored mask", unmasked, "ignored-mask", NO_KEY, f"{SOME_HIDDEN}, or {{}}"
)
NARROW = SoftmaxBug("probabilities in bfloat16", "weights rounded to bfloat16", narrow)
STOPPED = SoftmaxBug(
    "gradient stopped at the scores",
    "a gradient stopped at the scores",
    _stopped,
    "stopped-gradient",
    operators=_BACKWARD,
)
EDGES = {
    edge: tuple(
        SoftmaxBug(
            f"one key {word} at the {edge} key",
            f"a mask (causal, or a window) that is off by one at the {edge} key of each query",
            bug if edge == "last" else at_the_start(bug),
            "mask-edge",
            "the keys at that edge have hardly any weight, or values like the others'",
            "small inputs, drawn at random, so that every key has some weight",
        )
        for word, bug in (("more", one_key_more), ("less", one_key_less))
    )
    for edge in ("last", "first")
}
"""Edge -> a mask that shows one key more there, and one that shows one key less."""
NOWHERE = SoftmaxBug("NaN", "weights that are NaN", nowhere)
"""Not a bug of ports: it marks everything computed from the weights."""


class Weightless:
    """Counts the keys to which softmaxes give no weight, or NaN, as in a row without keys."""

    operators = FORWARD

    def __init__(self) -> None:
        self.keys = 0

    def look(self, call: OperatorCall) -> None:
        scores, axis = call.args[:2]
        self.keys += int((~(scores.softmax(axis) > 0)).sum())
