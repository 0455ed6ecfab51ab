"""Right ports that compute in their own way: none fails."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_attn import parity
from jax_attn.parity.judge.budget import bridge
from jax_attn.parity.run.perturbed_mode import Perturbed
from jax_attn.transfer import Layout, linear, row


class Biased(nnx.Module):
    def __init__(self, reference: torch.nn.Linear, dtype: str):
        self.kernel = nnx.Param(jnp.array(reference.weight.detach().float().numpy().T, dtype))
        self.bias = nnx.Param(jnp.array(reference.bias.detach().float().numpy(), dtype))

    def __call__(self, x):
        return x @ self.kernel[...] + self.bias[...]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_bias_whose_gradient_jax_adds_up_in_few_bits_is_no_mistake(dtype, monkeypatch):
    """Over 301 tokens that sum errs by several times what rounding its result would make."""
    torch.manual_seed(0)
    reference = torch.nn.Linear(7, 5).to(getattr(torch, dtype))
    x = np.random.default_rng(0).standard_normal((7, 43, 7))

    def check():
        return parity.check(
            reference,
            Biased(reference, dtype),
            (x,),
            layout=Layout(row("weight", "kernel", linear), row("bias", "bias")),
            dtype=dtype,
            transforms=("jit",),
        )

    right = check()
    assert right.verdict != "FAIL"
    bias = next(report for report in right.tensors if report.name == "bias")
    assert bias.ratio > 2  # of torch's own error
    monkeypatch.setattr(Perturbed, "_bridge", lambda self, name, n, *_: bridge(n, self.precision))
    assert check().verdict == "FAIL"
