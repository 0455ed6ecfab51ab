"""Squared terms of products are those of the first run, as long as the order is the same."""

import numpy as np
import pytest
import torch

from jax_attn.parity.judge.parts import dot
from jax_attn.parity.run.modes.sums import Squares

A, B = (
    torch.randn(5, 5, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
    for i in range(2)
)
ROW = A[:1]
FIRST = [("mm", (A, B)), ("mm", (ROW, B)), ("addmm", (ROW, B, A)), ("mm", (A, A))]
# What a later run computes -> how many of its products are those of the first.
LATER = {
    "the same": (FIRST, 4),
    "another operator": ([FIRST[0], ("bmm", (ROW[None], B[None])), *FIRST[2:]], 1),
    "another shape": ([FIRST[0], ("mm", (ROW.T, ROW)), *FIRST[2:]], 1),
    "one fewer": ([*FIRST[:2], FIRST[3]], 2),
    "one more": ([*FIRST, ("mm", (B, B))], 4),
}


def is_of_the_first(squares, a, b):
    """Whether these went through float32; else they are exact."""
    want = a.square() @ b.square()
    assert torch.allclose(squares, want, rtol=2.0**-23, atol=0)
    return not torch.equal(squares, want)


@pytest.mark.parametrize("row", LATER)
def test_a_later_run_takes_the_products_of_the_first_until_one_is_another(row):
    calls, known = LATER[row]
    first = Squares()
    for name, args in FIRST:
        squares, _ = first.terms(name, args, {})
        assert not is_of_the_first(squares, *args[-2:])
        squares.mul_(0.0)  # as a caller may
    later = Squares(first)
    for place, (name, args) in enumerate(calls):
        squares, terms = later.terms(name, args, {})
        a, b = args[-2:]
        assert terms == a.shape[-1]
        assert is_of_the_first(squares, a, b) == (place < known)


def test_what_there_is_no_room_for_is_computed_again():
    first = Squares(room=4 * (A.numel() + ROW.numel()))
    for call in FIRST:
        first.terms(*call, {})
    later = Squares(first)
    known = [is_of_the_first(later.terms(*call, {})[0], *call[1][-2:]) for call in FIRST]
    assert known == [True, True, False, False]


@pytest.mark.parametrize("scale", [1e-20, 1e-40, 1e20])
def test_squares_beyond_the_range_of_float32_are_computed_again(scale):
    first = Squares()
    first.terms("mm", (scale * A, B), {})
    squares, _ = Squares(first).terms("mm", (scale * A, B), {})
    assert not is_of_the_first(squares, scale * A, B)


def test_squares_of_zeros_are_those_of_the_first():
    first = Squares()
    first.terms("mm", (A, 0 * B), {})
    assert first._kept[0][1] is not None


def test_sums_that_are_no_products_are_computed_each_time():
    first = Squares()
    squares, terms = first.terms("mean", (A, [1]), {})
    assert terms == 5
    assert torch.allclose(squares, A.square().sum(1) / 25, rtol=1e-15)
    assert torch.equal(Squares(first).terms("sum", (B, [0]), {})[0], B.square().sum(0))


def test_a_long_sum_of_products_is_as_accurate_as_numpys():
    a = np.random.default_rng(0).standard_normal(10**6 + 7)
    exact = float(np.square(a, dtype=np.longdouble).sum())
    assert abs(dot(a, a) - exact) <= 1e-14 * exact
