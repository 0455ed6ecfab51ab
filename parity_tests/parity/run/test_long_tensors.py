"""A long tensor's rounding by XLA is that of NumPy, under whatever settings JAX has."""

import jax
import pytest
import torch
from jax.sharding import AxisType

from jax_attn.parity.judge.budget import PRECISIONS
from jax_attn.parity.run.modes import long_tensors
from jax_attn.parity.run.modes.draws import PART, Draws
from jax_attn.parity.run.modes.rounding import DrawnRounding

N = PART + 1

SPECIAL = [0.0, -0.0, 1e-30, -1e-38, 1e-44, 3.0, -3.0, float("inf"), float("-inf"), float("nan")]
SETTINGS = {
    "the defaults": {},
    "x64": {"jax_enable_x64": True},
    "NaN refused": {"jax_debug_nans": True, "jax_debug_infs": True},
    "not compiled": {"jax_disable_jit": True},
    "transfers refused": {"jax_transfer_guard": "disallow"},
    "strict": {"jax_numpy_dtype_promotion": "strict", "jax_numpy_rank_promotion": "raise"},
}


def numbers():
    x = torch.randn(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=torch.float64)
    by = 1e-7 * torch.rand(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    by[20:30] = 0.0
    by[30] = torch.inf
    return x, by


def rounded(name, precision, x, *others):
    return getattr(DrawnRounding(PRECISIONS[precision], Draws(3)), name)(x, *others)


def both(monkeypatch, name, precision, x, *others):
    """By XLA, and by NumPy."""
    by_xla = rounded(name, precision, x.clone(), *others)
    with monkeypatch.context() as context:
        context.setattr(long_tensors, "_cpu", lambda: None)
        return by_xla, rounded(name, precision, x.clone(), *others)


def expect_same(a, b):
    """But for the last bit, as a product and a sum may be rounded at once."""
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.isinf(), b.isinf())
    finite = b.isfinite()
    assert torch.allclose(a[finite], b[finite], rtol=2.0**-51, atol=2.0**-170)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16", "mxu"])
def test_what_is_stored_is_as_by_numpy(precision, settings, monkeypatch):
    x, _ = numbers()
    old = {name: getattr(jax.config, name) for name in SETTINGS[settings]}
    try:
        for name, value in SETTINGS[settings].items():
            jax.config.update(name, value)
        by_xla, by_numpy = both(monkeypatch, "stored", precision, x)
    finally:
        for name, value in old.items():
            jax.config.update(name, value)
    expect_same(by_xla, by_numpy)
    assert (by_xla != x).float().mean() > 0.5


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_that_is_set_is_not_for_it(axis_type, monkeypatch):
    x, _ = numbers()
    with jax.set_mesh(jax.make_mesh((2,), ("x",), axis_types=(axis_type,))):
        by_xla, by_numpy = both(monkeypatch, "stored", "float32", x)
        assert jax.sharding.get_mesh().size == 2
    expect_same(by_xla, by_numpy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_sums_are_as_by_numpy_and_exact_ones_stay(precision, dtype, monkeypatch):
    x, by = numbers()
    by_xla, by_numpy = both(monkeypatch, "summed", precision, x, by.to(dtype))
    expect_same(by_xla, by_numpy)
    assert torch.equal(by_xla[20:30], x[20:30])
    assert (by_xla[31:] != x[31:]).float().mean() > 0.9


def test_what_is_rounded_may_be_written_to_and_leaves_its_source():
    x, _ = numbers()
    before = x.clone()
    stored = rounded("stored", "float32", x)
    stored.mul_(0.0)
    assert torch.equal(x.nan_to_num(1.0), before.nan_to_num(1.0))
    assert not rounded("stored", "float32", x[-1000:]).equal(x[-1000:])


def test_only_long_plain_tensors_of_one_run_go_by_xla():
    x = torch.zeros(2, N, dtype=torch.float64)
    assert long_tensors.is_long(x)
    assert not long_tensors.is_long(x.T)
    assert not long_tensors.is_long(x.float())
    assert not long_tensors.is_long(x[:, : PART // 2])
    assert not long_tensors.is_long(x[0, :PART])
