"""Perturbed runs in one pass are those that are made one by one, each with draws of its own."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from jax_attn.parity.judge.budget import PRECISIONS
from jax_attn.parity.judge.compare import rms
from jax_attn.parity.run import reference as reference_module
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.modes.many_runs import RunsTensor
from jax_attn.parity.run.modes.perturbed_mode import Perturbed
from jax_attn.parity.run.modes.sums import ProductErrors
from jax_attn.parity.run.reference import Reference

RUNS = 5


class Of(nn.Module):
    """A function of the input and of a module's parts."""

    def __init__(self, call, *parts):
        super().__init__()
        self.call, self.parts = call, nn.ModuleList(parts)
        self.scale = nn.Parameter(torch.linspace(0.3, 0.9, 6))
        self.register_buffer("shift", torch.linspace(-0.4, 0.7, 6))

    def forward(self, x):
        return self.call(self, x, *self.parts)


def written_in_place(module, x):
    y = torch.zeros(2, 7, 6, dtype=x.dtype)
    y[:, 2] = x[:, 1] * 3
    y[:, 3:5].add_(x[:, 3:5]).mul_(module.scale)
    turned = y.transpose(0, 1)[1:6]
    turned.copy_(x.transpose(0, 1)[1:6] / 3)
    return y + x


def scattered(module, x):
    at = torch.arange(7).flip(0)[None, :, None].expand(2, 7, 6)
    return torch.zeros_like(x).scatter_add_(1, at, x) + x.cumsum(1)[:, [3]]


def masked(module, x):
    """The positions of a mask that all runs decide alike."""
    y = x * module.scale
    kept = x > 0
    return y.sum() + y[kept].square().sum()


def branching(module, x):
    y = (x * module.scale).sum()
    return x * 3 if bool(y > -1e6) else x * 5


def kept_between_calls(module, x):
    module.shift.mul_(0.9).add_(x.mean((0, 1)))
    return x * module.shift


def gradient_inside(module, x):
    with torch.inference_mode(False), torch.enable_grad():
        at = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad((at**3).sum() / 3, at)
    return x * slope.detach().clone() * module.scale


def complex_products(module, x):
    """Its backward pass conjugates, which torch does by a bit that only a view sets."""
    turned = torch.fft.rfft(x, dim=1) * torch.complex(module.scale, module.shift)
    return torch.fft.irfft(turned, n=7, dim=1) + turned.conj().imag.sum(1, keepdim=True)


MODULES = {
    "attention": Of(lambda m, x, a: a(x, x, x)[0], nn.MultiheadAttention(6, 2, batch_first=True)),
    "encoder layer": Of(lambda m, x, a: a(x), nn.TransformerEncoderLayer(6, 3, 11, 0.0)),
    "lstm": Of(lambda m, x, a: a(x)[0], nn.LSTM(6, 5, batch_first=True)),
    "gru": Of(lambda m, x, a: a(x)[0], nn.GRU(6, 5, bidirectional=True)),
    "convolution, batch norm": Of(
        lambda m, x, c, n: n(c(x.mT)), nn.Conv1d(6, 5, 3, groups=1), nn.BatchNorm1d(5).eval()
    ),
    "running statistics": Of(lambda m, x, n: n(x.mT).mT, nn.BatchNorm1d(6, momentum=0.25)),
    "group norm": Of(lambda m, x, n: n(x.mT), nn.GroupNorm(3, 6)),
    "embedding": Of(lambda m, x, e: e(torch.arange(14).reshape(2, 7) % 5) * x, nn.Embedding(11, 6)),
    "constants": Of(lambda m, x: x * torch.cos(torch.arange(6.0) * 0.1) + m.shift / 3),
    "parameters alone": Of(lambda m, x: x + m.scale.exp() * 0.7),
    "powers and numbers": Of(lambda m, x: x.abs().pow(0.3) + functional.leaky_relu(x, 0.3) / 7),
    "written in place": Of(written_in_place),
    "scattered": Of(scattered),
    "a mask's positions": Of(masked),
    "a branch that all take": Of(branching),
    "a buffer that a call changes": Of(kept_between_calls),
    "chosen by rank": Of(lambda m, x: x.topk(3, dim=1)[0] * (x @ x.mT).softmax(-1).sum()),
    "einsum": Of(lambda m, x: torch.einsum("btd,bsd,d->bts", x, x, m.scale)),
    "complex products": Of(complex_products),
    "gradient inside": Of(gradient_inside),
}


def prepared(module, seed=0):
    torch.manual_seed(seed)
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)
    x = np.random.default_rng(seed).standard_normal((2, 7, 6)).astype(np.float32)
    reference = Reference(module, None, Inputs((x,), {}))
    cotangents = {
        name: np.random.default_rng(1).standard_normal(a.shape).astype(np.float32)
        for name, a in reference.outputs("float32").items()
    }
    return reference, cotangents


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODULES)
def test_each_run_of_a_pass_is_the_run_of_its_seed(name, precision):
    reference, cotangents = prepared(MODULES[name])
    center, _ = reference.center(cotangents)
    seeds = range(1, RUNS + 1)
    rounding = PRECISIONS[precision]
    together = reference.under(Perturbed(rounding, seeds), cotangents, again=True)
    first = ProductErrors()
    for place, seed in enumerate(seeds):
        mode = Perturbed(rounding, seed, products=ProductErrors(first) if place else first)
        alone = reference.under(mode, cotangents, again=True).kinds
        for kind, tensors in together.one(place).kinds.items():
            assert tensors.keys() == alone[kind].keys()
            for tensor, got in tensors.items():
                moved = alone[kind][tensor] - center.kinds[kind][tensor]
                other = got - alone[kind][tensor]
                # Draws are hashes of numbers: a last bit of float64 makes another of one in many.
                # Were all of them others, `other` would be larger than `moved` by sqrt(2).
                assert rms(other) <= rms(moved) / 2, (kind, tensor)


@pytest.mark.parametrize("name", MODULES)
def test_the_runs_of_a_pass_differ_in_each_number_that_is_rounded(name):
    reference, cotangents = prepared(MODULES[name])
    center = reference.center(cotangents)[0].kinds
    seeds = range(1, RUNS + 1)
    together = reference.under(Perturbed(PRECISIONS["float32"], seeds), cotangents)
    alone = reference.under(Perturbed(PRECISIONS["float32"], 1), cotangents).kinds
    for kind, tensors in together.kinds.items():
        for tensor, each in tensors.items():
            moved = alone[kind][tensor] != center[kind][tensor]
            for a, b in zip(each[1:], each[:-1], strict=True):
                assert ((a != b) | ~moved).mean() > 0.95, (kind, tensor)


def test_runs_with_one_key_would_be_the_same(monkeypatch):
    """That draws differ by keys alone: the check above can fail."""
    draws = reference_module.Perturbed(PRECISIONS["float32"], [7, 7, 7]).rounding.draws
    x = RunsTensor(torch.ones(3, 5, dtype=torch.float64))
    same = draws.alike(x, draws.key(), 2.0**-24).each
    assert torch.equal(same, same[:1].expand(3, 5))


def dividing(module, x):
    """Branches by a number that runs have differently."""
    y = (x * module.scale).sum()
    return x * (3 if int(y.item() * 2**40) % 2 else 5)


def on_the_host(module, x):
    return x * torch.from_numpy(x.detach().numpy().max(keepdims=True).astype(np.float64)).to(x)


def turned_in_place(module, x):
    return (x * module.scale).mT.clone().transpose_(0, 1).transpose_(0, 1)


@pytest.mark.parametrize("call", [dividing, on_the_host, turned_in_place])
def test_what_cannot_go_on_in_one_pass_is_run_one_by_one(call, monkeypatch):
    reference, cotangents = prepared(Of(call))
    budgets = []
    for small in (2**18, -1):
        monkeypatch.setattr(reference_module, "_SMALL", small)
        budgets.append(reference.spread("float32", cotangents, RUNS))
    for kind, named in budgets[0].items():
        for name, budget in named.items():
            assert np.array_equal(budget.element, budgets[1][kind][name].element)


@pytest.mark.parametrize("name", MODULES)
def test_a_small_module_takes_one_pass(name, monkeypatch):
    modes, under = [], Reference.under

    def watched(self, mode, *args, **options):
        modes.append(mode)
        return under(self, mode, *args, **options)

    monkeypatch.setattr(Reference, "under", watched)
    reference, cotangents = prepared(MODULES[name])
    reference.spread("float32", cotangents, RUNS)
    assert [mode.runs for mode in modes if isinstance(mode, Perturbed)] == [RUNS]
