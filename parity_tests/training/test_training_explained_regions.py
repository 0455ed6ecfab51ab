"""`Result.explain` of a training with wrong gradients, and of one whose search is interrupted."""

import jax
import numpy as np
import optax
import pytest
import torch
from flax import nnx

from helpers.parity.training_checks import adamw, linear_check
from jax_attn import GroupedQueryAttention, parity, transfer
from jax_attn.parity.explaining import explain as explaining
from jax_attn.training import explain
from torch_ref import DESIGNS


class Scaled(nnx.Module):
    """Attention whose result is 3% too large."""

    def __init__(self):
        self.attention = GroupedQueryAttention(13, 6, 3, head_dim=5, rngs=nnx.Rngs(0))

    def __call__(self, query: jax.Array) -> jax.Array:
        return self.attention(query) * 1.03


@pytest.fixture(scope="module")
def scaled_result():
    torch.manual_seed(0)
    reference, port = DESIGNS["gqa"](13, 6, 3, head_dim=5), Scaled()
    layout = transfer.LAYOUTS["gqa"].under("", "attention")
    transfer.load(port, reference.state_dict(), layout)
    rng = np.random.default_rng(0)
    batch = {name: rng.standard_normal((3, 7, 13), np.float32) for name in ("query", "target")}
    return parity.check_training(
        reference, port, [batch], layout=layout, optimizer=adamw, loss="mse", steps=3
    )


@pytest.mark.slow
def test_wrong_gradients_are_explained_as_those_of_a_check_are(scaled_result):
    explanation = scaled_result.explain()
    (cause, *_) = explanation.regions[0].causes
    assert (cause.name, cause.value) == ("scale", pytest.approx(1.03, rel=1e-4))
    assert explanation.first_wrong.kind == "gradient of parameter"


def interrupted(*args):
    raise KeyboardInterrupt


@pytest.mark.slow
def test_an_interrupted_search_for_regions_is_told_and_ends_the_explanation(
    scaled_result, monkeypatch
):
    monkeypatch.setattr(explaining, "find_causes", interrupted)
    monkeypatch.setattr(explain, "_causes", lambda *args: pytest.fail("not ended"))
    explanation = scaled_result.explain()
    assert explanation.stopped == "interrupted"
    assert explanation.regions
    assert explanation.to_json()["stopped"] == "interrupted"


@pytest.mark.slow
def test_an_interrupted_search_for_a_recipe_is_told(monkeypatch):
    result = linear_check(port_optimizer=optax.sgd(0.2))
    monkeypatch.setattr(explain, "recipe_bugs", interrupted)
    explanation = result.explain()
    assert (explanation.stopped, explanation.causes) == ("interrupted", ())
    assert explanation.first_wrong.transform.startswith("update")
    assert "interrupted" in str(explanation)
