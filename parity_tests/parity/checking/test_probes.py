"""The two halves of a check: once the reference was asked, no judgement of a port needs it."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jax_attn.parity.checking.check as checking
from jax_attn import MultiHeadAttention
from jax_attn.parity import Verdict, check
from jax_attn.parity.checking.canaries.integers import other_integers
from jax_attn.parity.checking.probes import OF_OTHER_INPUTS, PROBES, complete
from jax_attn.parity.judge.result import Result
from jax_attn.transfer import EMBEDDING, LAYOUTS, LINEAR, Layout, load

B, T, D, VOCABULARY = 2, 7, 12, 11


class Gone:
    """What stands for a reference that was deleted."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the reference was asked for {name!r} while a port was judged")


class Pair(NamedTuple):
    reference: torch.nn.Module
    ports: dict[str, nnx.Module]
    inputs: Any
    options: dict[str, Any] = {}  # noqa: RUF012  not changed


def _attention() -> Pair:
    reference = torch.nn.MultiheadAttention(D, 3, batch_first=True).eval()
    right, wrong = (MultiHeadAttention(D, 3, rngs=nnx.Rngs(0), scale=s) for s in (None, 0.6))
    for port in (right, wrong):
        load(port, reference.state_dict(), LAYOUTS["torch_mha"])
    options = {"layout": LAYOUTS["torch_mha"], "reference_call": lambda m, x: m(x, x, x)[0]}
    x = np.random.default_rng(0).standard_normal((B, T, D))
    return Pair(reference, {"right": right, "another scale": wrong}, (x,), options)


class Embedder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, D, padding_idx=0)
        self.places = torch.nn.Embedding(T, D)

    def forward(self, tokens, positions):
        return self.tokens(tokens) * torch.tanh(self.places(positions))


class EmbedderPort(nnx.Module):
    def __init__(self, reads=True):
        self.tokens, self.places = (nnx.Embed(n, D, rngs=nnx.Rngs(0)) for n in (VOCABULARY, T))
        self.reads = reads

    def __call__(self, tokens, positions):
        positions = positions if self.reads else jnp.broadcast_to(jnp.arange(T), positions.shape)
        return self.tokens(tokens) * jnp.tanh(self.places(positions))


def _integers() -> Pair:
    reference, layout = (
        Embedder(),
        Layout(EMBEDDING.under("tokens", "tokens"), EMBEDDING.under("places", "places")),
    )
    ports = {"right": EmbedderPort(), "positions unread": EmbedderPort(reads=False)}
    for port in ports.values():
        load(port, reference.state_dict(), layout)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (B, T))
    inputs = {"tokens": tokens, "positions": np.tile(np.arange(T), (B, 1))}
    return Pair(reference, ports, inputs, {"layout": layout})


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(D))

    def forward(self, x):
        self.total += x.detach().sum((0, 1))
        return x * torch.tanh(self.total)


class CountingPort(nnx.Module):
    def __init__(self, counts=True):
        self.total, self.counts = nnx.BatchStat(jnp.zeros(D)), counts

    def __call__(self, x):
        total = self.total[...] + jax.lax.stop_gradient(x).sum((0, 1))
        if self.counts:
            self.total[...] = total
        return x * jnp.tanh(total)


def _state() -> Pair:
    x = np.random.default_rng(0).standard_normal((B, T, D))
    ports = {"right": CountingPort(), "counts nothing": CountingPort(counts=False)}
    return Pair(Counting(), ports, (x,))


class Narrow(nnx.Module):
    def __init__(self, slope=0.0):
        make = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
        self.up, self.slope = nnx.Linear(D, 5 * D, **make), slope

    def __call__(self, x):
        y = self.up(x)
        return jnp.where(y > 0, y, self.slope * y)


class TorchNarrow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(D, 5 * D, dtype=torch.bfloat16)

    def forward(self, x):
        return torch.relu(self.up(x))


def _narrow() -> Pair:
    reference, layout = TorchNarrow(), LINEAR.under("up", "up")
    ports = {"right": Narrow(), "a slope below": Narrow(slope=0.1)}
    for port in ports.values():
        load(port, reference.state_dict(), layout)
    x = np.random.default_rng(0).standard_normal((B, T, D))
    return Pair(reference, ports, (x,), {"layout": layout, "dtype": "bfloat16"})


PAIRS = {f.__name__.strip("_"): f for f in (_attention, _integers, _state, _narrow)}


def seen(result: Result) -> Any:
    tensors = [(t.transform, t.label, t.verdict, t.fraction, t.reasons) for t in result.tensors]
    return result.verdict, tensors, result.findings


@pytest.fixture
def forgotten(monkeypatch):
    """Let `check` complete what it prepares, and forget the reference."""
    prepare = checking.prepare

    def prepared_whole(reference, dtype, **options):
        prepared = prepare(reference, dtype, **options)
        complete(prepared)
        for part in filter(None, (prepared, prepared.again)):
            others = part.fact(other_integers)
            for each in filter(None, (part, others.together, *others.each.values())):
                object.__setattr__(each, "reference", Gone())
        return prepared

    monkeypatch.setattr(checking, "prepare", prepared_whole)


@pytest.mark.parametrize("name", PAIRS)
def test_a_port_is_judged_alike_without_the_reference(name, request):
    torch.manual_seed(0)
    pair = PAIRS[name]()
    options = {"transforms": ("eager",), **pair.options}
    wanted = {
        kind: seen(check(pair.reference, port, pair.inputs, **options))
        for kind, port in pair.ports.items()
    }
    request.getfixturevalue("forgotten")
    for kind, port in pair.ports.items():
        assert seen(check(pair.reference, port, pair.inputs, **options)) == wanted[kind], kind
    assert [verdict is Verdict.FAIL for verdict, *_ in wanted.values()] == [False, True]


def test_that_proof_can_fail(forgotten, monkeypatch):
    asks = PROBES[0]._replace(
        judge=lambda _, prepared, side: prepared.reference.near_decisions  # in the second half
    )
    monkeypatch.setattr(checking, "PROBES", (asks,))
    pair = _attention()
    with pytest.raises(AssertionError, match="asked for 'near_decisions'"):
        check(pair.reference, pair.ports["right"], pair.inputs, **pair.options)


def test_a_narrow_dtype_that_is_judged_again_is_asked_once_of_what_no_budget_changes(monkeypatch):
    asked, pair = [], _narrow()
    counted = [
        probe._replace(
            prepare=lambda prepared, probe=probe: asked.append(probe) or probe.prepare(prepared)
        )
        for probe in PROBES
    ]
    monkeypatch.setattr(checking, "PROBES", counted)
    options = {**pair.options, "transforms": ("jit",)}
    assert check(pair.reference, pair.ports["a slope below"], pair.inputs, **options).failures == ()
    assert asked.count(PROBES[0]) == 1
    assert [asked.count(probe) for probe in PROBES if probe.by_budget] == [2, 2]


def test_other_inputs_are_asked_for_only_by_a_port_that_runs_eagerly(monkeypatch):
    asked, (*_, probe) = [], OF_OTHER_INPUTS
    counted = probe._replace(prepare=lambda prepared: asked.append(1) or probe.prepare(prepared))
    monkeypatch.setattr(checking, "OF_OTHER_INPUTS", (counted,))
    pair = _attention()
    for transform, times in (("jit", 0), ("eager", 1)):
        options = {**pair.options, "transforms": (transform,)}
        check(pair.reference, pair.ports["right"], pair.inputs, **options)
        assert len(asked) == times


def test_what_is_asked_of_a_reference_is_asked_once(monkeypatch):
    """Two ports are judged by one prepared reference."""
    asked = []
    first = PROBES[0]
    counted = first._replace(prepare=lambda prepared: asked.append(1) or first.prepare(prepared))
    monkeypatch.setattr(checking, "PROBES", (counted, *PROBES[1:]))
    pair = _attention()
    prepare, made = checking.prepare, []

    def once(reference, dtype, **options):
        made[:] = made or [prepare(reference, dtype, **options)]
        return made[0]

    monkeypatch.setattr(checking, "prepare", once)
    for port in pair.ports.values():
        check(pair.reference, port, pair.inputs, **{**pair.options, "transforms": ("eager",)})
    assert asked == [1]
    assert replace(made[0])._facts == {}
