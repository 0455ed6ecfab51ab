"""Small references with a right and a wrong port each, for what is asked of a reference."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jax_attn import MultiHeadAttention
from jax_attn.transfer import EMBEDDING, LAYOUTS, LINEAR, Layout, load

B, T, D, VOCABULARY = 2, 7, 12, 11


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
