"""What training mode asks of a translation: when it is traced, and what of it is left out."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from helpers.training_nets import RATE, B, D, DropPath, Functional, LayerDrop, PythonDrop, T
from helpers.translated import assert_computes
from jax_attn.translate import both_modes
from jax_attn.translate.proof import loaded
from jax_attn.translate.translation import translate

X = np.ones((B, T, D), np.float32)


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


@pytest.mark.slow
@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_has_no_translation_leaves_eval_mode_and_is_said(name):
    kind, problem, text = LEFT_OUT[name]
    net = kind()
    translation = translate(net, (X,))
    (left_out,) = translation.untrained
    assert left_out.kind == problem
    assert text in left_out.text
    assert not translation.is_trained
    assert_computes(loaded(translation, net), net.eval(), X)


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
    translation, exports = exports_of(monkeypatch, net, X)
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
    net = kind()
    translation = translate(net, (X,))
    assert translation.is_trained
    port = loaded(translation, net)
    port.train()
    kept = np.asarray(port(X)) != 0
    assert 0 < kept.mean() < 1
