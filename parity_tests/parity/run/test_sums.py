"""What products err by is that of the first run, as long as the order is the same."""

import numpy as np
import pytest
import torch

from jax_attn.parity.judge.budget import PRECISIONS, bridge
from jax_attn.parity.judge.parts import dot
from jax_attn.parity.run.modes.sums import SUM_TERMS, ProductErrors, bounds

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


FLOAT32 = PRECISIONS["float32"]


def errors_of(products, name, args, precision=FLOAT32):
    a, b = args[-2:]
    return products.of(name, args, a @ b, precision).by


def is_of_the_first(by, a, b):
    """Whether these went through float32; else they are exact."""
    want = bounds(a @ b, a.square() @ b.square(), bridge(a.shape[-1], FLOAT32), FLOAT32)
    assert torch.allclose(by.double(), want, rtol=2.0**-23, atol=0)
    return by.dtype is torch.float32


@pytest.mark.parametrize("row", LATER)
def test_a_later_run_takes_the_products_of_the_first_until_one_is_another(row):
    calls, known = LATER[row]
    first = ProductErrors()
    for name, args in FIRST:
        by = errors_of(first, name, args)
        assert not is_of_the_first(by, *args[-2:])
        by.mul_(0.0)  # as a caller may
    later = ProductErrors(first)
    for place, (name, args) in enumerate(calls):
        assert is_of_the_first(errors_of(later, name, args), *args[-2:]) == (place < known)


def test_what_there_is_no_room_for_is_computed_again():
    first = ProductErrors(room=4 * (A.numel() + ROW.numel()))
    for call in FIRST:
        errors_of(first, *call)
    later = ProductErrors(first)
    known = [is_of_the_first(errors_of(later, *call), *call[1][-2:]) for call in FIRST]
    assert known == [True, True, False, False]


@pytest.mark.parametrize("scale", [1e-20, 1e30])
def test_errors_beyond_the_range_of_float32_are_computed_again(scale):
    precision = PRECISIONS["float64" if scale < 1 else "float32"]  # of the other none is as small
    first = ProductErrors()
    errors_of(first, "mm", (scale * A, scale * B), precision)
    later = errors_of(ProductErrors(first), "mm", (scale * A, scale * B), precision)
    assert later.dtype is torch.float64


def test_errors_of_zeros_are_those_of_the_first_and_zero():
    first = ProductErrors()
    errors_of(first, "mm", (A, 0 * B))
    later = errors_of(ProductErrors(first), "mm", (A, 0 * B))
    assert later.dtype is torch.float32
    assert not later.any()


def test_sums_of_counts_do_not_err():
    counts = torch.tensor([[1.0, 2.0], [0.5, 2.0]], dtype=torch.float64)
    ones = torch.ones(2, 1, dtype=torch.float64)
    for by in (
        errors_of(ProductErrors(), "mm", (counts, ones)).flatten(),
        bounds(counts.sum(1), counts.square().sum(1), bridge(2, FLOAT32), FLOAT32),
    ):
        assert [x > 0 for x in by.tolist()] == [False, True]


def test_the_squared_terms_of_sums():
    squares, terms = SUM_TERMS["mean"](A, [1])
    assert terms == 5
    assert torch.allclose(squares, A.square().sum(1) / 25, rtol=1e-15)
    assert torch.equal(SUM_TERMS["sum"](B, [0])[0], B.square().sum(0))


def test_a_long_sum_of_products_is_as_accurate_as_numpys():
    a = np.random.default_rng(0).standard_normal(10**6 + 7)
    exact = float(np.square(a, dtype=np.longdouble).sum())
    assert abs(dot(a, a) - exact) <= 1e-14 * exact
