"""The work of `explain` is bounded, an interruption keeps what was found, and a repeated error is
one region."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_attn import parity
from jax_attn.parity.explaining import causes, explain

B, T, D, LAYERS = 2, 3, 5, 3
X = np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class LayersPort(nnx.Module):
    """A port that scales each layer's input."""

    def __init__(self, reference):
        pairs = [(layer.weight, layer.bias) for layer in reference.layers]
        self.pairs = nnx.data(
            [[nnx.Param(jnp.array(p.detach().numpy())) for p in pair] for pair in pairs]
        )

    def __call__(self, x):
        for weight, bias in self.pairs:
            x = jnp.tanh(1.5 * (x @ weight[...].T + bias[...]))
        return x


@pytest.fixture(scope="module")
def result():
    reference = Layers()
    options = {"gradients": False, "transforms": ("jit",)}
    return parity.check(reference, LayersPort(reference), (X,), **options)


@pytest.mark.slow
def test_an_error_that_each_layer_repeats_is_one_region(result):
    (region,) = result.explain().regions
    assert len(region.again) == LAYERS - 1
    assert [cause.name for cause in region.causes] == ["scale"]
    assert len(result.explain().to_json()["regions"][0]["again"]) == LAYERS - 1


def test_two_calls_give_the_same_answer(result):
    assert str(result.explain()) == str(result.explain())


def test_an_interruption_keeps_what_was_found(result, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(explain, "find_causes", interrupted)
    explanation = result.explain()
    assert (explanation.stopped, len(explanation.regions)) == ("interrupted", 1)
    assert "interrupted" in str(explanation)
    monkeypatch.setattr(explain, "find_regions", interrupted)
    explanation = result.explain()
    assert (explanation.stopped, explanation.regions) == ("interrupted", ())
    assert "interrupted" in explanation.sentence


def test_the_runs_of_the_port_are_bounded(result, monkeypatch):
    monkeypatch.setattr(explain, "Allowance", partial(explain.Allowance, 1))
    explanation = result.explain()
    assert explanation.stopped.startswith("after")
    assert explanation.regions == ()


@pytest.mark.parametrize("most", [25, 27])
def test_what_was_found_when_the_runs_end_has_its_causes(most, result, monkeypatch):
    monkeypatch.setattr(explain, "Allowance", partial(explain.Allowance, most))
    explanation = result.explain()
    assert explanation.stopped.startswith("after")
    (region,) = explanation.regions
    assert region.tried
    assert [cause.name for cause in region.causes] == ["scale"]


def test_the_trials_of_a_region_are_bounded(result, monkeypatch):
    tried = []
    monkeypatch.setattr(causes, "MOST_TRIALS", 3)
    own = causes._Trials.tried
    monkeypatch.setattr(causes._Trials, "tried", lambda self, t: tried.append(t) or own(self, t))
    (region,) = result.explain().regions
    assert not [cause for cause in region.causes if cause.confirmed]
    assert len(tried) == 2 * 3  # for the narrowest region, and for the whole
