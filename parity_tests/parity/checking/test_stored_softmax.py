"""In bfloat16 a softmax may compute inside float32, as torch's does, or store each of its steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity.findings import kinds
from jax_attn.parity import Result, check
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.transfer import Layout, row


class Shifted(torch.nn.Module):
    """A mean of values by softmax. One number is added to all scores: its gradient is rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(1))

    def forward(self, scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.softmax(scores + self.shift, -1) @ values


class ShiftedPort(nnx.Module):
    def __init__(self, scale: float = 1.0):
        self.shift = nnx.Param(jnp.zeros(1, jnp.bfloat16))
        self.scale = scale

    def __call__(self, scores: jax.Array, values: jax.Array) -> jax.Array:
        scores = jnp.asarray(self.scale, scores.dtype) * scores
        return jax.nn.softmax(scores + self.shift[...], -1) @ values


def checked(scale: float = 1.0) -> Result:
    rng = np.random.default_rng(0)
    scores, values = rng.standard_normal((31, 67)), 3 + rng.standard_normal((67, 3))
    return check(
        Shifted().to(torch.bfloat16),
        ShiftedPort(scale),
        (scores, values),
        layout=Layout(row("shift", "shift")),
        dtype="bfloat16",
        transforms=("jit",),
    )


@pytest.mark.slow
def test_a_port_that_stores_each_step_passes_and_a_note_says_so():
    result = checked()
    assert (result.verdict, kinds(result, "standing note")[0]) == ("PASS", "judged-as-jax")


def test_it_would_fail_the_budget_of_a_softmax_in_float32(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Prepared, "judged_again", lambda _, result, judge: result)
    assert checked().verdict == "FAIL"


@pytest.mark.slow
def test_a_wrong_port_fails_either_budget():
    assert checked(scale=2.0).verdict == "FAIL"
