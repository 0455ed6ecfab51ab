"""A check that will be long or large says so on stderr; a small one is silent."""

import itertools
import re
from types import SimpleNamespace

import pytest

from helpers.fake_clock import FACTOR, Clock, is_right
from helpers.parity.block_pair import pair
from jax_attn import environment, progress
from jax_attn.parity import check
from jax_attn.parity.checking import preparing

GIB = 2**30
# parameters, free bytes -> what the line holds; None: there is no line.
MEMORY = {
    "small": ((10**6, 10**6, 8 * GIB), None),
    "large": ((10**8, 10**8, 4 * GIB), "GiB of 4.0 GiB that are free; parameters= limits"),
    "large, few gradients": ((10**8, 10**6, 4 * GIB), None),
    "large, of memory that is not known": ((10**8, 10**8, None), None),
}


@pytest.mark.parametrize("row", MEMORY)
def test_what_memory_a_check_will_take(row):
    given, words = MEMORY[row]
    line = preparing.memory(*given)
    assert line is None if words is None else words in line


# What is shown of 16 runs -> the seconds from each to the next.
SEQUENCES = {
    "one by one": 16 * [3.0],
    "a first that loads": [40.0, *(15 * [3.0])],
    "two at a time": 8 * [6.0, 0.0],
    "one, then two at a time": [5.0, *(7 * [4.0, 0.2]), 4.0],
    "a first pair that is slower": [7.0, 5.6, 0.0, *(6 * [3.2, 0.0]), 3.2],
    "of uneven length": [9.0, *(5 * [2.6, 3.7, 2.9])],
}
SHORT = {
    "one by one": 16 * [1.2],
    "a first that loads": [60.0, *(15 * [0.3])],
    "all at once": [90.0, *(15 * [0.001])],
    "two at a time": 8 * [2.0, 0.0],
}


def told(seconds, monkeypatch, capsys):
    """(what is true of the time left, what stderr says) as each run comes."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(progress, "A_LINE_EVERY", 0.0)
    clock = Clock(monkeypatch)
    made, lines = [], []

    def runs():
        for run, taken in enumerate(seconds):
            clock.now += taken
            made.append(run)
            yield run

    for run in preparing.shown(runs(), len(seconds)):
        assert made == [*range(run + 1)]
        lines.append((sum(seconds[run:]), capsys.readouterr().err))  # of the run before
    return lines[1:]


@pytest.mark.parametrize("name", SEQUENCES)
def test_runs_that_take_over_twenty_seconds_are_counted_once_that_is_known(
    name, monkeypatch, capsys
):
    lines = told(SEQUENCES[name], monkeypatch, capsys)
    first = next(i for i, (_, line) in enumerate(lines, 1) if line)
    assert first == 5
    (truth, announced), *counted = lines[first - 1 :]
    match = re.fullmatch(
        rf"parity.check: {16 - first} more perturbed runs, about (\d+) s; "
        "then canaries and the port's runs\n",
        announced,
    )
    assert truth / FACTOR <= int(match[1]) <= truth * FACTOR
    assert all(is_right(line, truth) for truth, line in counted), counted


@pytest.mark.parametrize("name", SHORT)
def test_runs_that_take_less_are_not(name, monkeypatch, capsys):
    assert not any(line for _, line in told(SHORT[name], monkeypatch, capsys))


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "lines"), [(2.0, 1), (0.0, 0)], ids=["slow", "small"])
def test_a_slow_check_says_so_once_before_it_goes_on(seconds, lines, x, monkeypatch, capsys):
    clock = itertools.count(0.0, seconds)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    check(*pair(), (x,), transforms=("jit",))
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("more perturbed runs") == lines


def test_memory_that_the_system_does_not_say_is_not_known(tmp_path, monkeypatch):
    assert environment.free_memory() is None or environment.free_memory() > 0
    monkeypatch.setattr(environment, "_MEMINFO", tmp_path / "none")
    assert environment.free_memory() is None
