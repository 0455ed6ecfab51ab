"""TF32: a GPU's tensor cores round what they multiply, unless they are told not to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.lax import Precision

from jax_attn import parity
from jax_attn.transfer import Layout, linear, row

LAYOUT = Layout(row("weight", "kernel", linear))


class Linear(nnx.Module):
    """A projection in float32. precision: of its product, whatever JAX's default is."""

    def __init__(self, reference, precision):
        self.kernel = nnx.Param(jnp.asarray(reference.weight.detach().numpy().T))
        self.precision = precision

    def __call__(self, x):
        return jnp.matmul(x, self.kernel[...], precision=self.precision)


def checked(precision):
    torch.manual_seed(0)
    reference = torch.nn.Linear(512, 257, bias=False)
    x = np.random.default_rng(0).standard_normal((8, 13, 512)).astype(np.float32)
    with jax.default_device(jax.devices("gpu")[0]):
        port = Linear(reference, precision)
        return parity.check(reference, port, (x,), layout=LAYOUT).verdict


@pytest.mark.parametrize("precision", [Precision.DEFAULT, Precision.HIGH, "TF32_TF32_F32"])
def test_products_in_tf32_fail(precision):
    assert checked(precision) is parity.Verdict.FAIL


@pytest.mark.parametrize("precision", [None, Precision.HIGHEST])
def test_products_in_float32_pass(precision):
    assert checked(precision) is parity.Verdict.PASS
