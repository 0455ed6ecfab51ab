"""A check that will be long or large says so on stderr; a small one is silent."""

import itertools

import pytest

from helpers.parity.block_pair import pair
from jax_attn import environment, progress
from jax_attn.parity import check
from jax_attn.parity.checking import estimate
from jax_attn.parity.judge.budget import RUNS

GIB = 2**30
# parameters, free bytes -> what the line holds; None: there is no line.
MEMORY = {
    "small": ((10**6, 10**6, 8 * GIB), None),
    "large": ((10**8, 10**8, 4 * GIB), "GiB of the 4.0 GiB that are free; parameters= limits"),
    "large, few gradients": ((10**8, 10**6, 4 * GIB), None),
    "large, of memory that is not known": ((10**8, 10**8, None), None),
}


@pytest.mark.parametrize("row", MEMORY)
def test_what_memory_a_check_will_take(row):
    given, words = MEMORY[row]
    line = estimate.memory(*given)
    assert line is None if words is None else words in line


@pytest.fixture
def a_run_takes(monkeypatch):
    """Sets how many seconds each look at the clock is after the last."""

    def set_clock(seconds):
        clock = itertools.count(0.0, seconds)
        monkeypatch.setattr(estimate.time, "perf_counter", lambda: next(clock))

    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(progress, "A_LINE_EVERY", 0.0)
    return set_clock


@pytest.mark.parametrize(("seconds", "long"), [(3.0, True), (2.0, False)], ids=["long", "short"])
def test_runs_that_take_over_twenty_seconds_are_counted_as_they_come(
    seconds, long, a_run_takes, capsys
):
    a_run_takes(seconds)
    made, taken = [], []

    def runs():
        for run in range(9):
            made.append(run)
            yield run

    for run in estimate.shown(runs(), 9):
        taken.append(run)
        assert made == taken
    told = capsys.readouterr()
    assert (told.out, taken) == ("", list(range(9)))
    announced = "parity.check: 8 more perturbed runs, up to 24 s; then canaries and the port's runs"
    counted = [
        f"parity.check: perturbed runs: {done} of 9 after 0 s, about 0 s left"
        for done in range(1, 10)
    ]
    assert told.err.splitlines() == ([announced, *counted] if long else [])


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "lines"), [(2.0, 1), (0.0, 0)], ids=["slow", "small"])
def test_a_slow_check_says_so_once_before_it_goes_on(seconds, lines, x, a_run_takes, capsys):
    a_run_takes(seconds)
    check(*pair(), (x,), transforms=("jit",))
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count(f"parity.check: {RUNS - 1} more perturbed runs") == lines
    assert told.err.count(f"perturbed runs: {RUNS} of {RUNS}") == lines


def test_memory_that_the_system_does_not_say_is_not_known(tmp_path, monkeypatch):
    assert environment.free_memory() is None or environment.free_memory() > 0
    monkeypatch.setattr(environment, "_MEMINFO", tmp_path / "none")
    assert environment.free_memory() is None
