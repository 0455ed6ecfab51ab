"""Facts about the softmaxes of a reference: the number of keys, and the spread of the weights."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from jax_attn.parity.bugs.bug import HIDES, OperatorCall, Site
from jax_attn.parity.bugs.softmax import DRAWN, FORWARD
from jax_attn.parity.judge.budget import PRECISIONS

# The share of rows for which a fact must hold to count as what hides bugs.
NEARLY_ALL = 0.9


class Hiding(NamedTuple):
    """Reasons why bugs of scores or weights stay hidden, and inputs that reveal them."""

    reason: str
    remedy: str


SINGLE = Hiding("each query sees a single key", "several keys")
SATURATED = Hiding(
    "the softmax is saturated, with all of a query's weight on one key",
    "smaller scores, by smaller inputs or weights",
)
ALIKE = Hiding("the scores hardly differ from key to key", DRAWN)
FAINT = Hiding(
    "the values hardly differ from key to key, or their part of the outputs is small", DRAWN
)


class AttentionFacts:
    """Counts, for each softmax, of rows that have one key, are saturated, or have equal weights.

    longest: the most keys of a query, including hidden ones. hides: whether a mask hides some key
    from a query that sees others; hides_first: whether it hides the first. empties: whether every
    key is hidden from some query.
    """

    operators = FORWARD

    def __init__(self, dtype: str):
        self.longest = 0
        self.hides = self.hides_first = self.empties = False
        self._store = PRECISIONS[dtype].store
        self._rows: dict[Site | None, torch.Tensor] = {}  # counts: all, single, saturated, alike

    def look(self, call: OperatorCall) -> None:
        scores, axis = call.args[0].double(), call.args[1]
        if not scores.numel() or not scores.ndim:
            return
        self.longest = max(self.longest, scores.shape[axis])
        self.empties |= bool((scores.amax(axis) <= HIDES).any())
        weights = torch.softmax(scores, axis).nan_to_num()
        largest, keys = weights.amax(axis), (weights > 0).sum(axis)
        first_hidden = weights.select(axis, 0) == 0
        self.hides_first |= bool((first_hidden & (keys > 0)).any())
        saturated, filled = largest >= 1 - self._store, _filled(scores, weights, axis)
        masked = scores.isneginf().any(axis) | filled | ((keys < scores.shape[axis]) & ~saturated)
        self.hides |= bool((masked & (keys > 0)).any())
        single = (keys == 1) & (masked | (scores.shape[axis] == 1))
        alike = (keys > 1) & (largest * keys <= 1 + 2.0**-10)
        rows = (keys > 0, single, saturated & ~single, alike)
        counts = torch.stack([x.sum() for x in rows])
        self._rows[call.site] = self._rows.get(call.site, 0) + counts

    def hiding(self, sites: Iterable[Site] | None = None) -> Hiding:
        """Return what hides bugs in nearly all rows of some softmaxes, or of all; else FAINT."""
        chosen = [self._rows[site] for site in (self._rows if sites is None else sites)]
        if not chosen:
            return FAINT
        rows, single, saturated, alike = torch.stack(chosen).sum(0).tolist()
        for hiding, count in ((SINGLE, single), (SATURATED, saturated), (ALIKE, alike)):
            if count >= NEARLY_ALL * rows:
                return hiding
        return FAINT


def _filled(scores: torch.Tensor, weights: torch.Tensor, axis: int) -> torch.Tensor:
    """Return whether several zero-weight keys of a row share one score, as after a mask's fill.

    Keys that have no weight only because another scores higher do not share a score."""
    weightless = (weights == 0) & scores.isfinite()
    low = torch.where(weightless, scores, torch.inf).amin(axis)
    high = torch.where(weightless, scores, -torch.inf).amax(axis)
    return (weightless.sum(axis) > 1) & (high - low <= 0.01 * low.abs())
