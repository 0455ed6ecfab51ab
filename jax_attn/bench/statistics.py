"""The uncertainty of a ratio of two times: percentile bootstrap over the rounds of a run.

A round measures every implementation once, so that whatever slows a round slows all of them:
rounds are redrawn whole. Medians, because a busy machine only ever adds time.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from jax_attn.bench.record import Ratio

Times: TypeAlias = Sequence[float]
"""Seconds of one call, one number a round."""

DRAWS = 2000
CONFIDENCE = 0.95
# With fewer rounds, redrawn medians say too little about the spread: the interval would be far
# too narrow.
FEWEST_ROUNDS = 5


def paired_ratio(baseline: Times, own: Times, seed: int = 0) -> Ratio:
    """Median baseline time over median own time, so that above 1 is faster than the baseline.

    baseline, own: seconds of one call, one number a round, of the same rounds in the same order.
    With fewer than five rounds the interval is (0, ∞), which shows no difference. Raises
    ValueError unless both sides have the same rounds and every time is finite and above 0.
    """
    sides = _checked(baseline=baseline, own=own)
    rng = np.random.default_rng(seed)
    return _interval(_over(np.median(sides, -1)), _over(_redrawn(sides, rng)), len(own))


def unpaired_ratio(first: Times, second: Times, seed: int = 0) -> Ratio:
    """Median of `first` over median of `second`, which have no rounds in common.

    Each side's rounds are redrawn alone: whatever slowed one side only widens the interval.
    Fewest rounds and ValueError as for `paired_ratio`.
    """
    sides = [_checked(first=first), _checked(second=second)]
    rng = np.random.default_rng(seed)
    draws = [_redrawn(side, rng)[0] for side in sides]
    medians = [np.median(side) for side in sides]
    return _interval(_over(medians), _over(draws), min(len(first), len(second)))


def change(before: tuple[Times, Times], after: tuple[Times, Times], seed: int = 0) -> Ratio:
    """How a time over its run's baseline changed between two runs: above 1 is slower.

    before, after: (baseline's seconds, own seconds) of each run. The two runs have no rounds
    in common and are redrawn separately. Fewest rounds and ValueError as for `paired_ratio`.
    """
    old = _checked(**dict(zip(("before's baseline", "before"), before, strict=True)))
    new = _checked(**dict(zip(("after's baseline", "after"), after, strict=True)))
    rng = np.random.default_rng(seed)
    median = _over(np.median(old, -1)) / _over(np.median(new, -1))
    draws = _over(_redrawn(old, rng)) / _over(_redrawn(new, rng))
    return _interval(median, draws, min(len(before[1]), len(after[1])))


def shared(first: Times, second: Times) -> tuple[Times, Times]:
    """Both, cut to the rounds that both were in: slow implementations leave a run early."""
    rounds = min(len(first), len(second))
    return first[:rounds], second[:rounds]


def _checked(**sides: Sequence[float]) -> np.ndarray:
    """(sides, rounds): the times of each, of the same rounds."""
    problems = [
        f"{name}: expected rounds with times above 0, got {list(times)}"
        for name, times in sides.items()
        if not len(times) or not all(math.isfinite(t) and t > 0 for t in times)
    ]
    if len({len(times) for times in sides.values()}) > 1:
        counts = " and ".join(f"{len(times)} of {name}" for name, times in sides.items())
        problems.append(f"expected times of the same rounds, got {counts}")
    if problems:
        raise ValueError("; ".join(problems))
    return np.array(list(sides.values()), float)


def _over(sides: Iterable[Any]) -> Any:
    first, second = sides
    return first / second


def _redrawn(times: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(sides, DRAWS): medians in runs made of this run's rounds, drawn whole with replacement."""
    rounds = times.shape[-1]
    chosen = rng.integers(rounds, size=(DRAWS, rounds))
    return np.median(times[:, chosen], axis=-1)


def _interval(median: np.ndarray, draws: np.ndarray, rounds: int) -> Ratio:
    if rounds < FEWEST_ROUNDS:
        return Ratio(float(median), 0.0, math.inf)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, (tail, 1 - tail))
    return Ratio(float(median), float(low), float(high))
