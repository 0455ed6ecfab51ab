"""A compiled loop rounds long tensors as torch's passes over short ones do."""

import math

import jax
import numpy as np
import pytest
import torch

from jax_attn.parity.judge.budget import PRECISIONS, bridge
from jax_attn.parity.run.modes import one_loop
from jax_attn.parity.run.modes.draws import Draws, unused_bits
from jax_attn.parity.run.modes.perturbed_mode import Perturbed
from jax_attn.parity.run.modes.rounding import DrawnRounding

LENGTH = one_loop.LENGTH


def numbers(count: int = LENGTH) -> torch.Tensor:
    """Of many sizes, zeros, small integers and what is not finite among them."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(count) * 10.0 ** rng.integers(-60, 30, count)
    x[::7] = rng.integers(-9, 9, len(x[::7]))
    x[3::1001] = np.resize([0.0, -0.0, math.inf, -math.inf, math.nan], len(x[3::1001]))
    return torch.from_numpy(x)


def assert_near(found: torch.Tensor, wanted: torch.Tensor, x: torch.Tensor) -> None:
    """Equal but for a fused product and sum, which is rounded once where torch rounds twice."""
    assert found.shape == wanted.shape
    off = (found - wanted).abs() > 2.0**-52 * x.abs()
    assert not (off & (found != wanted) & ~(found.isnan() & wanted.isnan())).any()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_stored_is_moved_as_torch_moves_it(precision):
    rounding, x = DrawnRounding(PRECISIONS[precision], Draws(3)), numbers()
    key = rounding.draws.key()
    assert one_loop.fits(x)
    found = one_loop.stored(x.clone(), *rounding.storing(key))
    halves = [rounding.stored_part(part, key) for part in x.split(LENGTH // 2)]
    assert_near(found, torch.cat(halves), x)
    assert not torch.equal(found, x)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_sums_are_moved_as_torch_moves_them(precision, monkeypatch):
    """Counts among them, which are exact, and terms that are lost."""
    terms = 5
    x = numbers(LENGTH * terms).reshape(LENGTH, terms)
    x[::3] = x[::3].round().clamp(-9, 9)

    def summed() -> torch.Tensor:
        with torch.no_grad(), Perturbed(PRECISIONS[precision], 1):
            return x.sum(dim=1)

    found = summed()
    monkeypatch.setattr(one_loop, "fits", lambda *_: False)
    wanted = summed()
    assert_near(found, wanted, wanted)
    counts = wanted[::3] == x[::3].sum(dim=1)
    assert counts.any()
    assert torch.equal(found[::3][counts], wanted[::3][counts])


def test_only_parts_of_its_length_take_the_loop(monkeypatch):
    lengths = []
    loop = one_loop.stored
    monkeypatch.setattr(one_loop, "stored", lambda x, *a: lengths.append(len(x)) or loop(x, *a))
    rounding = DrawnRounding(PRECISIONS["float32"], Draws(3))
    x = numbers(2 * LENGTH + 5)
    moved = rounding.stored(x)
    assert lengths == [LENGTH] * 2
    assert (moved[-5:] != x[-5:]).any()
    assert not one_loop.fits(x[:LENGTH].float())
    assert not one_loop.fits(x[: 2 * LENGTH : 2])


def test_equal_numbers_move_alike_in_a_loop_and_beside_it():
    rounding = DrawnRounding(PRECISIONS["float32"], Draws(3))
    x = torch.full((LENGTH + 1,), 1 / 3, dtype=torch.float64)
    moved = rounding.stored(x)
    assert (moved - moved[0]).abs().max() <= 2.0**-53
    assert moved[0] != x[0]


def test_it_leaves_jax_as_it_was():
    x64 = jax.config.jax_enable_x64
    args = (np.uint64(7), unused_bits(2.0**-24), 2.0**-24, 2.0**-126)
    one_loop.stored(numbers(), *args)
    one_loop.summed(
        numbers(), numbers().square(), bridge(5, PRECISIONS["float32"]), args[0], 9.0, *args
    )
    assert jax.config.jax_enable_x64 == x64
