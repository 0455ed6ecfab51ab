"""What torch's own code does in training mode only: dropout by functions, paths, and branches."""

import copy
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from helpers.training_nets import NETS, PATH_RATE, RATE, B, D, T
from helpers.translated import assert_computes
from jax_attn.parity import Verdict
from jax_attn.translate import both_modes, proof
from jax_attn.translate.proof import loaded
from jax_attn.translate.translation import translate


@cache
def made(name):
    torch.manual_seed(0)
    net = NETS[name]()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)
    return net, x, translate(net, (x,), dynamic={"x": {0: "B"}})


def with_slow(rows, fast):
    """Mark all rows but one as slow."""
    return [row if row == fast else pytest.param(row, marks=pytest.mark.slow) for row in rows]


@pytest.mark.parametrize("name", with_slow(NETS, fast="functional"))
def test_training_mode_is_that_of_torch(name):
    net, x, translation = made(name)
    result = proof._in_training(translation, net, (x,))
    assert result.verdict is Verdict.PASS, result
    assert {name for name, _ in net.named_parameters()} <= {each.name for each in result.tensors}
    assert translation.is_trained
    assert not translation.untrained


# what is wrong -> the module, what its source says, what is in its place
BUGS = {
    "no dropout": ("functional", "self.drop(x)", "x"),
    "another rate": ("functional", f"nnx.Dropout({RATE},", "nnx.Dropout(0.2,"),
    "no scale": ("functional", "self.drop(x)", f"self.drop(x) * {1 - RATE}"),
    "another place": ("functional", "self.down(self.drop(x))", "self.drop(self.down(x))"),
    "no dropout of weights": ("attention", f"nnx.Dropout({RATE},", "nnx.Dropout(0.0,"),
}


@pytest.mark.parametrize("bug", with_slow(BUGS, fast="another rate"))
def test_a_wrong_dropout_is_seen(bug):
    name, right, wrong = BUGS[bug]
    net, x, translation = made(name)
    assert right in translation.source
    altered = replace(translation, source=translation.source.replace(right, wrong))
    assert proof._in_training(altered, net, (x,)).verdict is Verdict.FAIL


@pytest.mark.slow
def test_eval_mode_is_bit_equal_to_a_translation_of_eval_mode_alone(monkeypatch):
    net, x, translation = made("all")
    monkeypatch.setattr(both_modes, "_alike", lambda *_: True)
    alone = translate(net, (x,))
    assert (alone.is_trained, translation.is_trained) == (False, True)
    called = nnx.jit(lambda port: port(x))
    expected = np.asarray(called(loaded(alone, net)))
    port = loaded(translation, net)
    assert np.array_equal(called(port), expected)
    port.train()
    assert not np.array_equal(called(port), expected)
    port.eval()
    assert np.array_equal(called(port), expected)
    source = translation.source.replace("deterministic = True", "deterministic = False")
    dropping = loaded(replace(translation, source=source), net)
    assert not np.array_equal(called(dropping), expected)


@pytest.mark.slow
def test_what_is_dropped_is_as_often_and_scaled_as_in_torch():
    net, _, translation = made("all")
    port = loaded(translation, net)
    port.train()
    attention, paths, _ = port.layers
    many = jnp.ones((1009, T, D))
    path = np.asarray(paths.path(many))
    assert np.array_equal(path, np.broadcast_to(path[:, :1, :1], path.shape))  # rows as a whole
    weights = np.asarray(attention.dropout(many))
    for kept, rate in ((path[:, 0, 0], PATH_RATE), (weights, RATE)):
        deviation = np.sqrt(rate * (1 - rate) / kept.size)
        assert abs((kept == 0).mean() - rate) < 5 * deviation
        assert np.unique(kept).tolist() == [0, np.float32(1) / np.float32(1 - rate)]


def test_training_steps_draw_anew_and_keep_the_stream_in_the_state():
    net, x, translation = made("all")
    port = loaded(translation, net)
    port.train()

    @nnx.jit
    def step(port, x):
        return nnx.value_and_grad(lambda port: (port(x) ** 2).sum())(port)[0]

    assert len({float(step(port, x)) for _ in range(3)}) == 3
    same = [step(nnx.clone(port), x) for _ in range(2)]
    assert np.array_equal(*same)
    port.eval()
    assert_computes(port, copy.deepcopy(net).eval(), x)


def transformer(kind, implementation):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 31,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "max_position_embeddings": 13,
    }
    rates = {
        "Bert": {"attention_probs_dropout_prob": RATE},
        "Llama": {"attention_dropout": RATE},
    }
    config = getattr(transformers, f"{kind}Config")(
        **sizes, **rates[kind], attn_implementation=implementation, use_cache=False
    )
    model = getattr(transformers, f"{kind}Model")(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    ids = np.random.default_rng(0).integers(0, 31, (3, T)).astype(np.int32)
    return model, {"input_ids": ids, "attention_mask": np.ones((3, T), np.int32)}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "implementation"), [("Bert", "eager"), ("Llama", "sdpa")])
def test_transformers_drop_attention_weights(kind, implementation):
    """One that is seen if it is left out, see BUGS; other models: translated_models.py."""
    torch.manual_seed(0)
    model, inputs = transformer(kind, implementation)
    translation = translate(model, inputs, dynamic={name: {0: "B", 1: "T"} for name in inputs})
    assert f"nnx.Dropout({RATE}" in translation.source
    result = proof._in_training(translation, model, inputs)
    assert not [each for each in result.tensors if each.verdict is Verdict.FAIL], result
    assert not result.failures
