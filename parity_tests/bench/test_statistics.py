"""Ratios of times and their intervals: how often they hold the truth, and what they see."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from helpers.bench import bench_record
from jax_attn.bench import statistics
from jax_attn.bench.record import Record
from jax_attn.bench.statistics import change, paired_ratio

DRAWN = 300
# Noise on a time, as (rng, rounds) → factors; a busy machine only adds.
NOISE = {
    "heavy tails": lambda rng, n: np.exp(0.05 * rng.standard_t(3, n)),
    "stalls": lambda rng, n: (
        np.exp(0.02 * rng.standard_normal(n))
        * np.where(rng.random(n) < 0.15, rng.uniform(1.5, 3, n), 1)
    ),
    "no mean": lambda rng, n: 1 + 0.05 * rng.pareto(1.0, n),
}


def rounds(noise: str, n: int, true: float, seed: int):
    """(baseline, own): n rounds on a machine that drifts, the baseline `true` times slower."""
    rng = np.random.default_rng(seed)
    drift = np.exp(0.1 * rng.standard_normal(n))
    return true * drift * NOISE[noise](rng, n), drift * NOISE[noise](rng, n)


def held(noise: str, n: int) -> float:
    """How often the interval holds the true ratio."""
    found = (paired_ratio(*rounds(noise, n, 1.7, seed)) for seed in range(DRAWN))
    return sum(r.low <= 1.7 <= r.high for r in found) / DRAWN


@pytest.mark.slow
@pytest.mark.parametrize("n", [7, 31])
@pytest.mark.parametrize("noise", NOISE)
def test_the_interval_holds_the_truth_nine_times_in_ten(noise, n):
    assert held(noise, n) >= 0.9


def test_that_check_can_fail(monkeypatch):
    monkeypatch.setattr(statistics, "CONFIDENCE", 0.5)
    assert held("stalls", 7) < 0.9


SIDES = {
    "a tenth faster": (1.1, 1),
    "a tenth slower": (1 / 1.1, -1),
    "alike": (1.0, 0),
}


@pytest.mark.parametrize(("true", "side"), SIDES.values(), ids=SIDES)
def test_a_tenth_is_seen_and_nothing_is_not(true, side):
    def one(seed):
        rng = np.random.default_rng(seed)
        noise = 1 + 0.02 * rng.standard_exponential((2, 11))
        return paired_ratio(true * noise[0], noise[1]).side

    assert sum(one(seed) == side for seed in range(100)) >= 90


def test_rounds_are_redrawn_whole():
    """What slows both sides of a round alike leaves the ratio as it is."""
    drift = np.random.default_rng(0).uniform(1, 9, 7)
    found = paired_ratio(2 * drift, drift)
    assert (found.median, found.low, found.high) == pytest.approx((2, 2, 2))
    other_rounds = paired_ratio(2 * drift, np.roll(drift, 1))
    assert other_rounds.high / other_rounds.low > 1.5


def test_the_median_is_that_of_the_medians():
    found = paired_ratio([8.0, 6.0, 7.0, 90.0, 1.0], [2.0, 2.0, 2.0, 2.0, 50.0])
    assert found.median == 3.5
    assert found.low <= 3.5 <= found.high


def test_the_same_seed_gives_the_same_interval():
    sides = rounds("heavy tails", 11, 1.7, 0)
    assert paired_ratio(*sides, seed=3) == paired_ratio(*sides, seed=3)
    assert paired_ratio(*sides, seed=3) != paired_ratio(*sides, seed=4)


def test_fewer_than_five_rounds_say_no_difference():
    few = paired_ratio([9.0] * 4, [1.0] * 4)
    assert (few.median, few.low, few.high) == (9, 0, math.inf)
    assert few.side == 0
    assert paired_ratio([9.0] * 5, [1.0] * 5).side == 1


def test_an_open_interval_is_null_in_a_file_and_reads_back():
    made = bench_record.record(bench_record.LONG[:1])
    row = replace(made.rows[0], ratio=paired_ratio([9.0], [1.0]))
    kept = replace(made, rows=(row,))
    assert '"high": null' in kept.to_json()
    assert Record.from_json(kept.to_json()) == kept


def test_only_rounds_that_both_were_in_are_paired():
    assert statistics.shared([1.0, 2.0, 3.0], [4.0, 5.0]) == ([1.0, 2.0], [4.0, 5.0])
    assert statistics.shared([1.0], [4.0, 5.0]) == ([1.0], [4.0])


REFUSED = {
    "other rounds": (([1.0] * 7, [1.0] * 5), "of the same rounds, got 7 of baseline and 5 of own"),
    "no rounds": (([], []), "baseline: expected rounds .*; own: expected rounds"),
    "a time of nothing": (([1.0, 0.0], [1.0, 1.0]), r"baseline: .* above 0, got \[1.0, 0.0\]"),
    "no number": (([1.0], [math.nan]), r"own: expected rounds with times above 0, got \[nan\]"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_is_no_pair_of_times_is_refused(row):
    sides, message = REFUSED[row]
    with pytest.raises(ValueError, match=message):
        paired_ratio(*sides)


# ------------------------------------------------------------------ between two runs

BETWEEN = {
    # true factor on the machine, true factor on the row: the side of 1 of the time over baseline
    "nothing changed": (1.0, 1.0, 0),
    "the machine is twice as slow": (2.0, 1.0, 0),
    "the row is a tenth slower": (1.0, 1.1, 1),
    "both": (2.0, 1.1, 1),
    "the row is a tenth faster": (1.0, 1 / 1.1, -1),
}


@pytest.mark.parametrize("row", BETWEEN)
def test_a_change_is_that_of_the_time_over_the_baseline(row):
    machine, own, side = BETWEEN[row]

    def one(seed):
        rng = np.random.default_rng(seed)
        before, after = 1 + 0.02 * rng.standard_exponential((2, 2, 11))
        return change((before[0], before[1]), (machine * after[0], machine * own * after[1]))

    found = [one(seed) for seed in range(100)]
    assert sum(r.side == side for r in found) >= 90
    assert np.median([r.median for r in found]) == pytest.approx(own, rel=0.02)


def test_runs_may_have_other_numbers_of_rounds_but_each_its_own_pairs():
    assert change(([1.0] * 7, [2.0] * 7), ([1.0] * 5, [3.0] * 5)).median == 1.5
    with pytest.raises(ValueError, match=re.escape("got 7 of after's baseline and 5 of after")):
        change(([1.0] * 7, [2.0] * 7), ([1.0] * 7, [3.0] * 5))


def test_few_rounds_in_either_run_say_no_difference():
    assert change(([1.0] * 7, [1.0] * 7), ([1.0] * 4, [9.0] * 4)).side == 0
