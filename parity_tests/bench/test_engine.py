"""The bench's engine without a framework: rounds, workers, a turn, memory."""

import os

import numpy as np
import pytest

from jax_attn.bench.engine import memory, runner
from jax_attn.bench.engine.rounds import Limits, interleaved
from jax_attn.bench.engine.runner import TURN_SECONDS, timed_round, timed_turn
from jax_attn.bench.engine.worker import (
    AbsentError,
    LostError,
    RefusedError,
    Worker,
    WorkerError,
    usable_cores,
)

# --- a turn ---------------------------------------------------------------------------------------


def test_a_turn_tells_when_a_call_returned_and_when_its_result_was_there(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(runner.time, "perf_counter", lambda: now[0])

    def after(seconds):
        now[0] += seconds

    found = timed_turn(lambda: after(0.25), lambda _: after(0.5), seconds=2.0)
    assert found == (0.75, 0.25)
    assert now == [2.25], "calls begin until the time is up"


# --- rounds ---------------------------------------------------------------------------------------


def simulated(durations, limits, failing=None):
    """(found, order of turns) of clocked turns that take `durations` seconds."""
    now, order, found = [0.0], [], {}

    def turn(name):
        def take():
            now[0] += durations[name]
            order.append(name)
            return None if failing == (name, order.count(name)) else durations[name]

        return take

    turns = {name: turn(name) for name in durations}
    for _ in interleaved(turns, found, "anchor", limits, 0, lambda: now[0]):
        pass
    return found, order


def test_each_round_has_everyone_once_in_an_order_of_its_own():
    names = ["anchor", "b", "c", "d"]
    found, order = simulated(dict.fromkeys(names, 1.0), Limits(7, 7, 100.0))
    rounds = [tuple(order[i : i + 4]) for i in range(0, len(order), 4)]
    assert [sorted(r) for r in rounds] == [names] * 7
    assert len(set(rounds)) > 3
    assert {len(s) for s in found.values()} == {7}


LEAVING = {
    "a slow one leaves when its time is spent": (
        {"anchor": 0.1, "slow": 2.0, "quick": 0.1},
        Limits(3, 9, 7.0),
        {"anchor": 9, "slow": 4, "quick": 9},
    ),
    "but not before the least": (
        {"anchor": 0.1, "slow": 50.0},
        Limits(5, 9, 7.0),
        {"anchor": 9, "slow": 5},
    ),
    "the anchor stays while anybody does": (
        {"anchor": 50.0, "quick": 0.1},
        Limits(3, 9, 7.0),
        {"anchor": 9, "quick": 9},
    ),
    "and leaves with the last": (
        {"anchor": 50.0, "slow": 50.0},
        Limits(3, 9, 7.0),
        {"anchor": 3, "slow": 3},
    ),
}


@pytest.mark.parametrize("row", LEAVING)
def test_who_leaves_the_rounds(row):
    durations, limits, expected = LEAVING[row]
    found, _ = simulated(durations, limits)
    assert {name: len(s) for name, s in found.items()} == expected


def test_one_that_fails_leaves_and_keeps_what_it_had():
    found, order = simulated({"anchor": 1.0, "b": 1.0}, Limits(5, 5, 100.0), failing=("b", 3))
    assert (len(found["b"]), order.count("b"), len(found["anchor"])) == (2, 3, 5)


def test_rounds_asked_for_are_just_as_many():
    assert Limits.of(3) == Limits(3, 3)
    assert Limits.of(None) == Limits()


# --- workers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worker():
    made = Worker("stand-in", "helpers.bench.bench_stand_in:StandIn", threads=1)
    yield made
    made.close()


def test_a_worker_answers_and_what_it_prints_goes_nowhere(worker, capfd):
    arrays = {"a": np.arange(3)}
    (back,) = worker.ask("echo", arrays)
    assert np.array_equal(back["a"], arrays["a"])
    assert capfd.readouterr() == ("", "")


def test_a_worker_has_the_threads_it_is_given_and_as_many_cores(worker):
    can_be_kept_to_some = hasattr(os, "sched_getaffinity")  # Linux alone has it
    assert worker.ask("threads") == ("1", 1 if can_be_kept_to_some else os.cpu_count())
    assert usable_cores() >= 1


def test_a_worker_tells_what_went_wrong_and_lives(worker):
    with pytest.raises(AbsentError, match="does not import: it is planted"):
        worker.ask("load")
    with pytest.raises(RefusedError, match="not for this workload"):
        worker.ask("refuse")
    with pytest.raises(WorkerError, match=r"^fail: ArithmeticError: planted$"):
        worker.ask("fail")
    assert worker.ask("echo", 1) == (1,)


def test_a_process_that_dies_is_told_with_its_last_words():
    worker = Worker("stand-in", "helpers.bench.bench_stand_in:StandIn", threads=1)
    try:
        with pytest.raises(LostError, match="die: its process ended with status 7: last words"):
            worker.ask("die")
    finally:
        worker.close()


# --- a turn ---------------------------------------------------------------------------------------

COLD = {
    # (seconds, until it returned) of the first call, of a later one: of the turn
    "a short call is counted from the second on": ((0.1, 0.02), (0.01, 0.001), (0.01, 0.001)),
    "a long call has no second": ((0.3, 0.02), (0.01, 0.001), (0.3, 0.02)),
}


@pytest.mark.parametrize("row", COLD)
def test_the_cold_call_of_a_turn_counts_only_where_that_does_not_show(row):
    first, later, turn = COLD[row]
    asked = []

    def take(seconds):
        asked.append(seconds)
        return later if len(asked) > 1 else first

    assert timed_round(take) == turn
    assert asked == [0.0, TURN_SECONDS][: len(asked)]


# --- memory ---------------------------------------------------------------------------------------


def test_the_peak_of_a_call_counts_what_it_frees_and_every_time(worker):
    """In a worker, whose heap is small: to trim that of these tests would take seconds."""
    size = 24 * 2**20
    *peaks, of_nothing = worker.ask("peaks", [size, size, size, 0])
    # The worker's own heap moves by less than a tenth of it.
    assert all(0.9 * size < peak < 1.2 * size for peak in peaks)
    assert of_nothing < 0.1 * size


@pytest.mark.slow
def test_where_linux_does_not_tell_psutil_samples(monkeypatch):
    pytest.importorskip("psutil")
    monkeypatch.setattr(memory, "_resets", lambda: False)
    size = 64 * 2**20
    assert 0.9 * size < memory.peak_during(lambda: np.ones(size, np.uint8)) < 1.5 * size
