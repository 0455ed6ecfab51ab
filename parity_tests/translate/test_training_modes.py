"""What torch's own code does in training mode only: dropout by functions, paths, and branches."""

import copy
import random
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn
from torch.nn import functional

from jax_attn.parity import Verdict
from jax_attn.translate import both_modes, proof
from jax_attn.translate.proof import loaded
from jax_attn.translate.translation import translate

B, T, D, N = 5, 7, 6, 2
RATE, PATH_RATE = 0.3, 0.2


class Functional(nn.Module):
    """A rate of 0 and one that is left out in eval mode, as transformers passes it."""

    def __init__(self, rate=RATE):
        super().__init__()
        self.dropout = rate
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        x = functional.dropout(self.up(x), self.dropout, self.training)
        x = functional.dropout(x, 0.0, self.training)
        return self.down(functional.dropout(x, self.dropout if self.training else 0.0))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.rate = nn.Linear(D, 3 * D), RATE

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, N, D // N).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        rate = self.rate if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=rate)
        return mixed.transpose(1, 2).reshape(x.shape)


class DropPath(nn.Module):
    """As timm has it."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if self.rate == 0.0 or not self.training:
            return x
        kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * kept.div_(1 - self.rate)


def stochastic_depth(x, rate, training):
    """As transformers has it."""
    if not training:
        return x
    noise = (1 - rate) + torch.rand((x.shape[0], 1, 1), dtype=x.dtype)
    return x.div(1 - rate) * noise.floor_()


class StochasticDepth(nn.Module):
    """As torchvision has it."""

    def __init__(self, rate, mode):
        super().__init__()
        self.p, self.mode = rate, mode

    def forward(self, x):
        if not self.training:
            return x
        size = [x.shape[0] if self.mode == "row" else 1] + [1] * (x.ndim - 1)
        noise = torch.empty(size, dtype=x.dtype, device=x.device).bernoulli_(1 - self.p)
        return x * noise.div_(1 - self.p)


class Paths(nn.Module):
    def __init__(self, rate=PATH_RATE, mode="row"):
        super().__init__()
        self.one, self.path = nn.Linear(D, D), DropPath(rate)
        self.depth = StochasticDepth(RATE, mode)

    def forward(self, x):
        x = self.depth(x) + self.path(self.one(x))
        return x + stochastic_depth(x.sin(), PATH_RATE, self.training)


class Branch(nn.Module):
    """Other numbers and other operators, and dropout of channels by a layer that NNX lacks."""

    def __init__(self):
        super().__init__()
        self.one, self.channels = nn.Linear(D, D), nn.Dropout1d(RATE)

    def forward(self, x):
        x = self.channels(self.one(x)) * (2.0 if self.training else 3.0)
        x = x * torch.tensor([2.0, 3.0] if self.training else [0.5, 0.25]).repeat(D // 2)
        return x.tanh() if self.training else x.sin() + 1


class Noise(nn.Module):
    """What else is drawn."""

    def __init__(self):
        super().__init__()
        self.one, self.gate = nn.Linear(D, D), nn.Linear(D, 1)

    def forward(self, x):
        x = self.one(x)
        if self.training:
            x = x + 0.1 * torch.randn_like(x) + torch.empty_like(x).normal_(0.5, 0.25)
            x = x * torch.bernoulli(self.gate(x).sigmoid()) + torch.rand_like(x)
        return x + torch.randn(D) if self.training else x


class Net(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


NETS = {
    "functional": lambda: Functional(),
    "attention": lambda: Attention(),
    "paths": lambda: Net(Paths(), Paths(0.1, "batch"), Paths(0.0)),
    "branch": lambda: Branch(),
    "noise": lambda: Noise(),
    "all": lambda: Net(Attention(), Paths(), Branch()),
}


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


BUGS = {
    "no dropout": ("self.drop(x)", "x"),
    "another rate": ("nnx.Dropout(0.3,", "nnx.Dropout(0.2,"),
    "no scale": ("self.drop(x)", f"self.drop(x) * {1 - RATE}"),
    "another place": ("self.down(self.drop(x))", "self.drop(self.down(x))"),
}


@pytest.mark.parametrize("bug", with_slow(BUGS, fast="another rate"))
def test_a_wrong_dropout_is_seen(bug):
    net, x, translation = made("functional")
    right, wrong = BUGS[bug]
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
    net = copy.deepcopy(net).eval()
    np.testing.assert_allclose(port(x), net(torch.from_numpy(x)).detach(), rtol=1e-5)


class LayerDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(D, D) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            if self.training and self.drawn() < RATE:
                continue
            x = layer(x)
        return x

    def drawn(self):
        return torch.rand([])


class PythonDrop(LayerDrop):
    def drawn(self):
        return random.random()


class Counting(nn.Module):
    """A buffer that only training writes."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(D, D)
        self.register_buffer("seen", torch.zeros(D))

    def forward(self, x):
        if self.training:
            self.seen += x.mean((0, 1)).detach()
        return self.up(x) + self.seen


class Recurrent(nn.Module):
    """Dropout between layers, beside a path that could be dropped."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(D, D, num_layers=2, dropout=RATE, batch_first=True)
        self.path = DropPath(RATE)

    def forward(self, x):
        x = functional.dropout(x, RATE, self.training)
        return x + self.path(self.rnn(x)[0])


LEFT_OUT = {
    "dropout of a recurrent layer": (Recurrent, "operator", "_VF.gru"),
    "layer drop": (LayerDrop, "data-dependent size", "< RATE"),
    "layer drop by Python": (PythonDrop, "module", ""),
    "a buffer": (Counting, "buffer", "self.seen += "),
}


@pytest.mark.parametrize("name", with_slow(LEFT_OUT, fast="layer drop"))
def test_what_has_no_translation_leaves_eval_mode_and_is_said(name):
    kind, problem, text = LEFT_OUT[name]
    net, x = kind(), np.ones((B, T, D), np.float32)
    translation = translate(net, (x,))
    (left_out,) = translation.untrained
    assert left_out.kind == problem
    assert text in left_out.text
    assert not translation.is_trained
    expected = net.eval()(torch.from_numpy(x)).detach()
    np.testing.assert_allclose(loaded(translation, net)(x), expected, rtol=1e-5)


def exports_of(monkeypatch, net, x):
    seen = []
    export = both_modes.exported

    def exported(*arguments, **options):
        seen.append(options)
        return export(*arguments, **options)

    monkeypatch.setattr(both_modes, "exported", exported)
    return translate(net, (x,)), len(seen)


@pytest.mark.parametrize(
    ("net", "count"),
    [
        (nn.Sequential(nn.Linear(D, D), nn.Dropout(RATE)), 1),
        (Functional(0.0), 1),
        pytest.param(Functional(), 2, marks=pytest.mark.slow),
    ],
    ids=["layers alone", "a rate of 0", "a rate"],
)
def test_the_second_export_is_made_where_training_does_something(monkeypatch, net, count):
    x = np.ones((B, T, D), np.float32)
    translation, exports = exports_of(monkeypatch, net, x)
    assert (exports, translation.is_trained) == (count, count == 2)
    assert not translation.untrained
    assert net.training


class Scaled(nn.Module):
    def forward(self, x):
        return x * torch.tensor(2.0 if self.training else 3.0)


class Returning(nn.Module):
    def forward(self, x):
        a, b = x.sin(), x.sin()
        return {"a": a, "b": b} if self.training else {"a": b, "b": a}


@pytest.mark.parametrize(
    ("net", "is_alike"),
    [
        (Functional(0.0), True),
        (Functional(), False),
        (nn.Sequential(nn.BatchNorm1d(T), Functional(0.0)), False),
        (Scaled(), False),
        (Returning(), False),
        (PythonDrop(), False),
    ],
    ids=["a rate of 0", "a rate", "statistics", "a constant", "another output", "Python draws"],
)
def test_modules_that_do_the_same_in_both_modes_are_told(net, is_alike):
    kept = {name: buffer.clone() for name, buffer in net.named_buffers()}
    x = torch.ones(B, T, D)
    assert both_modes._alike(net, (x,)) is is_alike
    assert all(torch.equal(kept[name], buffer) for name, buffer in net.named_buffers())
    assert net.training


class Shared(nn.Module):
    """One dropout in two modules, which NNX has no layer for."""

    def __init__(self):
        super().__init__()
        drop = nn.Dropout(RATE)
        self.first, self.second = (nn.Sequential(nn.Linear(D, D), drop) for _ in range(2))

    def forward(self, x):
        return self.second(self.first(x))


class Lender(nn.Module):
    """A module that only holds a dropout."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(RATE)


class Borrower(nn.Module):
    def forward(self, x, drop):
        return drop(x)


class Borrowing(nn.Module):
    """A dropout that another module calls than the one that contains it."""

    def __init__(self):
        super().__init__()
        self.one, self.lender, self.borrower = nn.Linear(D, D), Lender(), Borrower()

    def forward(self, x):
        return self.borrower(self.one(x), self.lender.drop)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Shared, Borrowing])
def test_a_dropout_of_another_module_drops_too(kind):
    net, x = kind(), np.ones((B, T, D), np.float32)
    translation = translate(net, (x,))
    assert translation.is_trained
    port = loaded(translation, net)
    port.train()
    kept = np.asarray(port(x)) != 0
    assert 0 < kept.mean() < 1


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
        "GPT2": {"attn_pdrop": RATE},
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
@pytest.mark.parametrize(
    ("kind", "implementation"),
    [("Bert", "eager"), ("Bert", "sdpa"), ("GPT2", "sdpa"), ("Llama", "eager"), ("Llama", "sdpa")],
)
def test_transformers_drop_attention_weights(kind, implementation):
    torch.manual_seed(0)
    model, inputs = transformer(kind, implementation)
    translation = translate(model, inputs, dynamic={name: {0: "B", 1: "T"} for name in inputs})
    result = proof._in_training(translation, model, inputs)
    assert not [each for each in result.tensors if each.verdict is Verdict.FAIL], result
    assert not result.failures
    source = translation.source.replace(f"nnx.Dropout({RATE}", "nnx.Dropout(0.0")
    assert source != translation.source
    altered = proof._in_training(replace(translation, source=source), model, inputs)
    assert altered.verdict is Verdict.FAIL
