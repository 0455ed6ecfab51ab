"""Draws of perturbed runs are uniform, and work part by part is work on the whole."""

import math

import pytest
import torch

from jax_attn.parity.run.modes.draws import PART, SCALE_OF_PAIR, Draws, in_parts

ROUNDOFF = {"float64": 2.0**-52, "float32": 2.0**-24, "bfloat16": 2.0**-8}


@pytest.mark.parametrize("precision", ROUNDOFF)
def test_draws_are_uniform_and_not_alike(precision):
    # So many that bfloat16's are of other eighths of units in the last place, nearly all.
    n = {"bfloat16": 500}.get(precision, 3 * PART + 1)
    x = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = Draws(3)
    drawn, other, opposite = (
        draws.alike(values, draws.key(), ROUNDOFF[precision]) for values in (x, x, -x)
    )
    for numbers in (drawn, other, opposite):
        assert numbers.abs().max() <= 1
        # Mean 0, square 1/3 with a variance of 4/45, neighbours uncorrelated: 5 standard errors.
        assert abs(numbers.mean()) <= 5 / math.sqrt(3 * n)
        assert abs(numbers.square().mean() - 1 / 3) <= 5 * math.sqrt(4 / 45 / n)
        for unlike in (numbers[1:] * numbers[:-1], drawn * other, drawn * opposite):
            assert abs(unlike.mean()) <= 5 / (3 * math.sqrt(len(unlike)))
    again = Draws(3)
    assert torch.equal(again.alike(x, again.key(), ROUNDOFF[precision]), drawn)


@pytest.mark.parametrize(
    ("precision", "of"),
    [("float64", "normal"), ("float32", "normal"), ("float32", "in steps"), ("bfloat16", "normal")],
)
def test_a_pair_of_draws_is_uniform_and_each_is_drawn_apart(precision, of):
    n = {"bfloat16": 500}.get(precision, 3 * PART + 1)
    x = torch.arange(1.0, n + 1, dtype=torch.float64)
    if of == "normal":
        x = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = Draws(3)
    key = draws.key()

    def halves(x):
        return [half * SCALE_OF_PAIR for half in draws.unscaled_pair(x, key, ROUNDOFF[precision])]

    pair, opposite = halves(x), halves(-x)
    whole = draws.alike(x, draws.key(), ROUNDOFF[precision])
    for half in (*pair, *opposite):
        assert half.abs().max() <= 1
        assert abs(half.mean()) <= 5 / math.sqrt(3 * n)
        assert abs(half.square().mean() - 1 / 3) <= 5 * math.sqrt(4 / 45 / n)
        assert abs((half[1:] * half[:-1]).mean()) <= 5 / (3 * math.sqrt(n - 1))
    first, second = pair
    apart = [(first, second), (first, whole), (second, whole)]
    # Of float64 no bit is left to mix the sign with.
    apart += zip(pair, opposite, strict=True) if precision != "float64" else []
    for a, b in apart:
        assert abs((a * b).mean()) <= 5 / (3 * math.sqrt(n))
    # Nor does the size of one tell that of the other.
    sizes = (first.square() - 1 / 3) * (second.square() - 1 / 3)
    assert abs(sizes.mean()) <= 5 * 4 / 45 / math.sqrt(n)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_numbers_that_are_rounded_alike_have_one_draw(precision):
    roundoff = ROUNDOFF[precision]
    row = torch.randn(7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    draws = Draws(3)
    equal = draws.alike(row.requires_grad_().expand(5, 7).T, draws.key(), roundoff)
    assert equal.shape == (7, 5)
    assert torch.equal(equal, equal[:, :1].expand(7, 5))
    assert len(equal[:, 0].unique()) == 7
    key = draws.key()
    near, far = (row.detach() * (1 + by * roundoff) for by in (1e-3, 1.0))
    same = draws.alike(row, key, roundoff) == draws.alike(near, key, roundoff)
    assert same.sum() >= 6
    assert not (draws.alike(row, key, roundoff) == draws.alike(far, key, roundoff)).any()


@pytest.mark.parametrize("shape", [(), (5, 7), (3, PART + 11)])
@pytest.mark.parametrize("order", ["contiguous", "transposed"])
def test_work_in_parts_is_work_on_the_whole(shape, order):
    x, y = (torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(2))
    if order == "transposed":
        x, y = x.T if x.ndim else x, y.T if y.ndim else y
    before, sizes = x.clone(), []

    def change(rows, a, b):
        sizes.append(a.numel())
        return 2 * a + b

    want = 2 * x + y
    assert torch.equal(in_parts(change, x, y), want)
    assert torch.equal(x, before)
    assert torch.equal(in_parts(change, x, y, out=x), want)
    split = x.numel() > PART and order == "contiguous"
    assert max(sizes) == (PART if split else x.numel())
    assert not split or torch.equal(x, want)
