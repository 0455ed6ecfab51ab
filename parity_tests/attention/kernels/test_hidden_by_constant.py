"""Rows that a finite constant hides, such as −1e9: by blocked, gradients are those of dense.

Where a bias hides all of a row, its weights are those of the scores alone, or equal, where the
constant swallows them; either way the maximum is as large as the constant, beside which float32
has no room for the log of a sum.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from helpers.attention import attention_definition as definition
from helpers.attention.kernel_comparison import draws, rounding, value_and_gradients
from jax_attn.attention.kernels import blocked

pytestmark = pytest.mark.filterwarnings("error")

B, T, N, H = 2, 160, 2, 5
SCALE = 0.25
CONSTANTS = {
    "-1e9": -1e9,
    "finfo.min": float(np.finfo(np.float32).min),
    "-1e4": -1e4,
}


def whole_rows():
    return np.ones((B, 1, T, T), bool)


def mixture():
    """Whole rows, padded keys, scattered keys, a row with one key left."""
    hidden = np.zeros((B, 1, T, T), bool)
    hidden[0, :, :, ::3] = hidden[1, :, :, 50:] = True
    hidden[1, :, 7] = hidden[0, :, 150:] = True
    hidden[0, 0, 2, 1:] = True
    return hidden


def errors(kernel, constant, hidden, dtype):
    """Of output and gradients: how far kernel and dense are apart, in units of the budget."""
    arrays = draws((B, T, N, H), (B, T, 1, H), (B, T, 1, H), (B, T, N, H))
    # Multiples of a quarter: with a scale of one their scores are exact, beside −1e4 too.
    arrays = [(np.round(4 * x) / 4).astype(jnp.dtype(dtype)) for x in arrays]
    bias = np.where(hidden, np.float32(constant), 0)
    wanted = value_and_gradients("dense", *arrays, bias=bias, scale=SCALE)
    made = value_and_gradients(kernel, *arrays, bias=bias, scale=SCALE)
    *qkv, cotangent = arrays
    # The constant hides a key unless it hides all of the row.
    allowed = ~hidden | hidden.all(axis=-1, keepdims=True)
    budgets = (
        definition.forward_budget(dtype, *qkv, allowed=allowed, scale=SCALE)[0],
        *definition.gradient_budget(dtype, cotangent, *qkv, allowed=allowed, scale=SCALE),
    )
    # A bias that the heads share gets the sum of their gradients.
    budgets = (*budgets[:-1], budgets[-1].sum(axis=1, keepdims=True))
    return [
        float(np.abs(np.float64(got) - np.float64(want)).max() / budget.max())
        for got, want, budget in zip(made, wanted, budgets, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hidden", [whole_rows, mixture])
@pytest.mark.parametrize("constant", CONSTANTS)
def test_gradients_are_dense_s(constant, hidden, dtype):
    assert max(errors("blocked", CONSTANTS[constant], hidden(), dtype)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("constant", CONSTANTS)
def test_a_log_sum_exp_in_place_of_maximum_and_sum_is_seen(constant, monkeypatch):
    outputs = blocked._outputs.__wrapped__

    def merged(sizes, call):
        out, maximum, total = outputs(sizes, call)
        return out, maximum + jnp.log(total), jnp.ones_like(total)

    monkeypatch.setattr(blocked, "_outputs", merged)
    out, *gradients = errors("blocked", CONSTANTS[constant], whole_rows(), "float32")
    assert out <= 1 < min(gradients)


@pytest.mark.slow
@pytest.mark.parametrize("extra", [{}, {"sinks": np.zeros(N, np.float32)}], ids=["none", "sinks"])
def test_a_bias_as_large_as_the_mark_of_a_row_without_keys(extra):
    """The row it lifts has weights, and gradients, next to a row that has none."""
    arrays = draws((B, T, N, H), (B, T, 1, H), (B, T, 1, H), (B, T, N, H))
    bias = np.zeros((1, 1, T, T), np.float32)
    bias[..., 3, 1:3], bias[..., 5, :] = np.finfo(np.float32).max, -np.inf
    options = {"bias": bias, "scale": SCALE, **extra}
    wanted, made = (value_and_gradients(k, *arrays, **options) for k in ("dense", "blocked"))
    for got, want in zip(made, wanted, strict=True):
        assert np.abs(got - want).max() <= rounding(arrays, want) * 2.0**53 * 2.0**-24
    values = np.abs(made[3][:, 1:3]).max(axis=(0, 2, 3))
    assert (values > np.abs(made[3][:, 3:]).max()).all()
