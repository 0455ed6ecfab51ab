"""A check that will be long or large says so on stderr; a small one is silent."""

import pytest

from helpers.block_pair import pair
from jax_attn.parity import check
from jax_attn.parity.checking import estimate

GIB = 2**30
# parameters, seconds of one run, free bytes -> what the line holds; None: there is no line.
ESTIMATES = {
    "small": ((10**6, 0.1, 8 * GIB), None),
    "long": ((10**6, 2.0, 8 * GIB), "about 60 s and 0.0 GiB of the 8.0 GiB that are free"),
    "large": ((10**8, 0.1, 4 * GIB), "about 3 s and 3.7 GiB of the 4.0 GiB"),
    "large, of memory that is not known": ((10**8, 0.1, None), None),
    "long, of memory that is not known": ((10**6, 2.0, None), "about 60 s and 0.0 GiB;"),
}


@pytest.mark.parametrize("row", ESTIMATES)
def test_what_a_check_will_take(row):
    given, words = ESTIMATES[row]
    line = estimate.estimate(*given)
    assert line is None if words is None else words in line


@pytest.mark.parametrize(("each", "lines"), [(2.0, 1), (0.0, 0)], ids=["slow", "small"])
def test_a_slow_check_says_so_once_before_it_goes_on(each, lines, x, monkeypatch, capsys):
    for name in ("perf_counter", "process_time"):
        clock = iter([0.0, each])
        monkeypatch.setattr(estimate.time, name, lambda clock=clock: next(clock, each))
    check(*pair(), (x,), transforms=("jit",))
    assert capsys.readouterr().err.count("parity.check: about") == lines


def test_memory_that_the_system_does_not_say_is_not_known(tmp_path, monkeypatch):
    assert estimate.free_memory() is None or estimate.free_memory() > 0
    monkeypatch.setattr(estimate, "_MEMINFO", tmp_path / "none")
    assert estimate.free_memory() is None
