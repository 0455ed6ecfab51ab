"""Activations that torch has a kernel for, whose steps a port writes out, and written numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn
from torch.nn import functional

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


class Activation(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.of = of

    def forward(self, x):
        return self.of(x)


class PortedActivation(nnx.Module):
    def __init__(self, of):
        self.of = of

    def __call__(self, x):
        return self.of(x)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_port_writes_out_an_activation_that_torch_has_a_kernel_for(name, dtype):
    of, ours = ACTIVATIONS[name]
    x = np.random.default_rng(0).standard_normal((16, 34))
    result = check(Activation(of), PortedActivation(ours), (x,), dtype=dtype, transforms=("jit",))
    assert result.verdict == "PASS", result


def test_a_gelu_of_the_other_kind_is_no_gelu():
    x = np.random.default_rng(0).standard_normal((16, 34))
    port = PortedActivation(jax.nn.gelu)
    assert check(Activation(functional.gelu), port, (x,), transforms=("jit",)).verdict == "FAIL"
