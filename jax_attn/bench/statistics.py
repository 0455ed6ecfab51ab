"""The uncertainty of a ratio of two times: percentile bootstrap over the rounds of a run.

A round measures every implementation once, so that whatever slows a round slows all of them.
Therefore rounds are redrawn whole. The statistic is the median, because a busy machine only ever
adds time.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from jax_attn.bench.record import Ratio

Times: TypeAlias = Sequence[float]
"""Seconds of one call, one number per round."""

DRAWS = 2000
CONFIDENCE = 0.95
# With fewer rounds, redrawn medians say too little about the spread: the interval would be far
# too narrow.
FEWEST_ROUNDS = 5


def paired_ratio(baseline: Times, own: Times, seed: int = 0) -> Ratio:
    """Return the median baseline time over the median own time; above 1 is faster.

    baseline, own: seconds of one call, one number per round, of the same rounds in the same order.
    With fewer than five rounds the interval is (0, ∞), which shows no difference. Raises
    ValueError unless both sides have the same rounds and every time is finite and above 0.
    """
    return _ratio([_checked(baseline=baseline, own=own)], lambda sides: sides[0] / sides[1], seed)


def change(before: tuple[Times, Times], after: tuple[Times, Times], seed: int = 0) -> Ratio:
    """Return by what factor a time over its run's baseline changed; above 1 is slower.

    before, after: (baseline's seconds, own seconds) of each run. The two runs have no rounds in
    common and are redrawn separately. Few rounds and invalid times are handled as in
    `paired_ratio`.
    """
    old = _checked(**{"before's baseline": before[0], "before": before[1]})
    new = _checked(**{"after's baseline": after[0], "after": after[1]})
    return _ratio([old, new], lambda old, new: old[0] / old[1] / (new[0] / new[1]), seed)


def shared(first: Times, second: Times) -> tuple[Times, Times]:
    """Cut both to the rounds that they share, because slow implementations leave a run early."""
    rounds = min(len(first), len(second))
    return first[:rounds], second[:rounds]


def _checked(**sides: Sequence[float]) -> np.ndarray:
    """Return the times as an array (sides, rounds). Raises ValueError with all problems."""
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


def _ratio(runs: Sequence[np.ndarray], of: Callable[..., Any], seed: int) -> Ratio:
    """Return the ratio with its bootstrap interval.

    runs: an array (sides, rounds) per run; whole rounds are drawn with replacement, separately for
    each run. of: computes the ratio from the medians of each run's sides.
    """
    median = float(of(*(np.median(times, -1) for times in runs)))
    if min(times.shape[-1] for times in runs) < FEWEST_ROUNDS:
        return Ratio(median, 0.0, math.inf)
    rng = np.random.default_rng(seed)
    drawn = (times[:, rng.integers(n := times.shape[-1], size=(DRAWS, n))] for times in runs)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(of(*(np.median(times, -1) for times in drawn)), (tail, 1 - tail))
    return Ratio(median, float(low), float(high))
