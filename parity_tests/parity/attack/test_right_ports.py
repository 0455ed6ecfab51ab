"""Right ports that compute in their own way: none fails."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_attn import parity
from jax_attn.parity.judge.budget import bridge
from jax_attn.parity.run.modes import perturbed_mode
from jax_attn.transfer import Layout, linear, load, row


class Biased(nnx.Module):
    def __init__(self, reference: torch.nn.Linear, dtype: str):
        self.kernel = nnx.Param(jnp.array(reference.weight.detach().float().numpy().T, dtype))
        self.bias = nnx.Param(jnp.array(reference.bias.detach().float().numpy(), dtype))

    def __call__(self, x):
        return x @ self.kernel[...] + self.bias[...]


@pytest.mark.slow
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
    finer = "jax_attn.parity.run.modes.perturbed_mode.bridge_of"
    monkeypatch.setattr(finer, lambda name, n, args, precision, coarse: bridge(n, precision))
    assert check().verdict == "FAIL"


class Perceptron(torch.nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(width, inner), torch.nn.Linear(inner, width)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)))


class FlaxPerceptron(nnx.Module):
    def __init__(self, width: int, inner: int):
        words = {"rngs": nnx.Rngs(0), "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        self.inner, self.outer = (
            nnx.Linear(width, inner, **words),
            nnx.Linear(inner, width, **words),
        )

    def __call__(self, x):
        return self.outer(nnx.relu(self.inner(x)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 10])
def test_a_relu_of_a_sum_that_flax_rounds_twice_is_no_mistake(seed, monkeypatch):
    """x W + b is near 0 where two larger numbers cancel: its sign hangs on the first rounding."""
    torch.manual_seed(seed)
    reference, port = Perceptron(8, 16).bfloat16(), FlaxPerceptron(8, 16)
    table = Layout(
        *(row(f"{name}.weight", f"{name}.kernel", linear) for name in ("inner", "outer")),
        *(row(f"{name}.bias", f"{name}.bias") for name in ("inner", "outer")),
    )
    load(port, reference.state_dict(), table)
    x = np.random.default_rng(seed).standard_normal((16, 8))

    def check():
        return parity.check(
            reference, port, (x,), layout=table, dtype="bfloat16", transforms=("eager",)
        )

    right = check()
    assert right.verdict == "INCONCLUSIVE", "one of few terms of a gradient"
    assert any("reference's relu at " in reason for reason in right.reasons)
    monkeypatch.setattr(perturbed_mode, "apart", lambda *_: None)
    assert check().verdict == "FAIL"
