"""Bugs are planted without writing to the parameters that all runs of a reference share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from jax_attn import parity
from jax_attn.parity.checking.canaries import weights
from jax_attn.parity.judge.compare import Verdict

IDS = np.random.default_rng(0).integers(0, 20, (3, 7))
INPUTS = {"ids": IDS, "types": np.zeros_like(IDS)}
JITTED = {"gradients": False, "transforms": ("jit",)}


class Reference(nn.Module):
    """Attention over normalized sums of two embeddings, with a low-rank update that is 0."""

    def __init__(self):
        super().__init__()
        self.tokens, self.types = nn.Embedding(20, 8), nn.Embedding(3, 8)
        self.norm = nn.LayerNorm(8)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, ids, types):
        x = self.norm(self.tokens(ids) + self.types(types))
        x = x + self.up(self.down(x))
        return (x @ x.mT / 8**0.5).softmax(-1) @ x


class Port(nnx.Module):
    """The reference's numbers, without what its neutral weights do."""

    def __init__(self, reference, scale=1.0):
        self.tokens, self.types = (
            nnx.Param(jnp.array(table.weight.detach().numpy()))
            for table in (reference.tokens, reference.types)
        )
        self.scale = scale

    def __call__(self, ids, types):
        x = self.tokens[...][ids] + self.types[...][types]
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return jax.nn.softmax(x @ x.swapaxes(1, 2) * 8**-0.5 * self.scale) @ x


@pytest.fixture
def reference():
    torch.manual_seed(0)
    return Reference().eval()


@pytest.mark.slow
def test_a_right_port_passes_whatever_neutral_weights_were_tried(reference):
    result = parity.check(reference, Port(reference), INPUTS, **JITTED)
    assert result.verdict is Verdict.PASS
    assert any("norm.weight" in note for note in result.notes)
    assert any("up.weight" in note for note in result.notes)


@pytest.mark.slow
def test_a_wrong_scale_is_explained_as_one(reference):
    result = parity.check(reference, Port(reference, 1.01), INPUTS, **JITTED)
    assert result.verdict is Verdict.FAIL
    assert "1.01 times as large" in result.explain().sentence


@pytest.mark.slow
def test_a_run_that_writes_to_shared_parameters_is_told(reference, monkeypatch):
    def written(reference, changes):
        def call(module, **inputs):
            with torch.no_grad():
                module.norm.weight.add_(0.5)
            return module(**inputs)

        return reference.called(call)

    monkeypatch.setattr(weights, "with_tensors", written)
    with pytest.raises(RuntimeError, match=r"norm\.weight"):
        parity.check(reference, Port(reference), INPUTS, **JITTED)
