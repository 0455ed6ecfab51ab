"""Draws of perturbed runs are uniform, and work part by part is work on the whole."""

import math

import pytest
import torch

from jax_attn.parity.run.draws import PART, Draws, in_parts


def test_draws_are_uniform_and_not_alike():
    draws = Draws(3)
    pooled, long = (draws.like(torch.empty(n)) for n in (PART - 7, 3 * PART + 1))
    for drawn in (pooled, long):
        n = len(drawn)
        assert drawn.abs().max() < 1
        # Mean 0, square 1/3 with a variance of 4/45, neighbours uncorrelated: 5 standard errors.
        assert abs(drawn.mean()) <= 5 / math.sqrt(3 * n)
        assert abs(drawn.square().mean() - 1 / 3) <= 5 * math.sqrt(4 / 45 / n)
        assert abs((drawn[1:] * drawn[:-1]).mean()) <= 5 / (3 * math.sqrt(n))
    one, other = draws.like(torch.empty(5, 7)), draws.like(torch.empty(5, 7))
    assert one.shape == (5, 7)
    assert not torch.equal(one, other)
    assert torch.equal(Draws(3).like(torch.empty(PART - 7)), pooled)


@pytest.mark.parametrize("shape", [(), (5, 7), (3, PART + 11)])
@pytest.mark.parametrize("order", ["contiguous", "transposed"])
def test_work_in_parts_is_work_on_the_whole(shape, order):
    x, y = (torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(2))
    if order == "transposed":
        x, y = x.T if x.ndim else x, y.T if y.ndim else y
    before, sizes = x.clone(), []

    def change(a, b):
        sizes.append(a.numel())
        return 2 * a + b

    want = 2 * x + y
    assert torch.equal(in_parts(change, x, y), want)
    assert torch.equal(x, before)
    assert torch.equal(in_parts(change, x, y, out=x), want)
    split = x.numel() > PART and order == "contiguous"
    assert max(sizes) == (PART if split else x.numel())
    assert not split or torch.equal(x, want)
