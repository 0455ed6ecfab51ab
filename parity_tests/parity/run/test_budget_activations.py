"""Activations that torch has a kernel for, whose steps a port writes out, and written numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from helpers.parity.functions import PortFunction, TorchFunction
from jax_attn.parity import check

# name -> torch's kernel, and what a port writes.
ACTIVATIONS = {
    "celu": (functional.celu, jax.nn.celu),
    "elu": (functional.elu, jax.nn.elu),
    "elu in place": (lambda x: functional.elu(x * 1.0, inplace=True), jax.nn.elu),
    "gelu": (functional.gelu, partial(jax.nn.gelu, approximate=False)),
    "gelu by tanh": (partial(functional.gelu, approximate="tanh"), jax.nn.gelu),
    "glu": (functional.glu, jax.nn.glu),
    "mish": (functional.mish, jax.nn.mish),
    "selu": (functional.selu, jax.nn.selu),
    "sigmoid": (torch.sigmoid, jax.nn.sigmoid),
    "silu": (functional.silu, jax.nn.silu),
    "silu in place": (lambda x: functional.silu(x * 1.0, inplace=True), jax.nn.silu),
    "softplus": (functional.softplus, jax.nn.softplus),
    "a tenth": (lambda x: 0.1 * x, lambda x: 0.1 * x),
    "a whole third": (lambda x: x[torch.arange(16) // 3], lambda x: x[jnp.arange(16) // 3]),
    "by infinity": (lambda x: x + x / torch.inf, lambda x: x + x / jnp.inf),
    "tanh in place": (lambda x: (9 * x).tanh_(), lambda x: jnp.tanh(9 * x)),
    "a third": (lambda x: x / 3, lambda x: x / 3),
    "mean": (lambda x: x.square().mean(0), lambda x: (x * x).mean(0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_port_writes_out_an_activation_that_torch_has_a_kernel_for(name, dtype):
    of, ours = ACTIVATIONS[name]
    x = np.random.default_rng(0).standard_normal((16, 34))
    result = check(TorchFunction(of), PortFunction(ours), (x,), dtype=dtype, transforms=("jit",))
    assert result.verdict == "PASS", result


@pytest.mark.parametrize(
    ("of", "ours"),
    [(functional.softplus, jax.nn.softplus), (functional.logsigmoid, jax.nn.log_sigmoid)],
)
def test_large_numbers_lose_digits_as_jax_differentiates_a_softplus(of, ours):
    """exp(x - softplus(x)): too many of bfloat16's to tell a right port from a wrong one."""
    x = 20 * np.random.default_rng(0).standard_normal((16, 34))
    for dtype, verdict in (("float32", "PASS"), ("bfloat16", "INCONCLUSIVE")):
        pair = TorchFunction(of), PortFunction(ours)
        result = check(*pair, (x,), dtype=dtype, transforms=("jit",))
        assert result.verdict == verdict, result


def test_a_softplus_that_is_off_by_a_thousandth_fails():
    x = 20 * np.random.default_rng(0).standard_normal((16, 34))
    port = PortFunction(lambda x: jax.nn.softplus(1.001 * x))
    assert (
        check(TorchFunction(functional.softplus), port, (x,), transforms=("jit",)).verdict == "FAIL"
    )


def scores_by_torch(x):
    seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    return (x @ x.mT).masked_fill(~seen, torch.finfo(x.dtype).min)


def scores_by_jax(x, factor=1.0):
    seen = jnp.tril(jnp.ones((len(x), len(x)), bool))
    return jnp.where(seen, factor * (x @ x.mT), jnp.finfo(x.dtype).min)


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "PASS"), (1.001, "FAIL")])
def test_scores_filled_with_the_lowest_number_of_their_dtype_are_compared(factor, verdict):
    """The oracle's own is that of float64."""
    x = np.random.default_rng(0).standard_normal((7, 5))
    port = PortFunction(partial(scores_by_jax, factor=factor))
    result = check(TorchFunction(scores_by_torch), port, (x,), transforms=("jit",))
    assert result.verdict == verdict, result


def test_a_gelu_of_the_other_kind_is_no_gelu():
    x = np.random.default_rng(0).standard_normal((16, 34))
    port = PortFunction(jax.nn.gelu)
    assert check(TorchFunction(functional.gelu), port, (x,), transforms=("jit",)).verdict == "FAIL"
