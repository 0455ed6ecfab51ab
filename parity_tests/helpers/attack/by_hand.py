"""Attention written by hand in torch, each with a step that inputs may fail to exercise."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from helpers.attack.port import Port, joined, split

D, N, H = 24, 4, 6


class Attention(nn.Module):
    """(x, memory=None, mask=None, language_id=None) -> (B, T, D)

    mask (B, T, S): False hides, by `fill`. The other options are steps, each of which does nothing
    where no input goes beyond it: clamp, softcap and tiny of the scores, window and clip of
    distances. eps: of a norm of x before it all. languages: how many rows their table has.
    """

    def __init__(
        self,
        *,
        fill=-1e9,
        clamp=None,
        softcap=None,
        clip=None,
        window=None,
        nan_to_num=False,
        languages=0,
        eps=None,
    ):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.fill, self.clamp, self.softcap, self.clip = fill, clamp, softcap, clip
        self.window, self.nan_to_num = window, nan_to_num
        self.language_embedding = nn.Embedding(languages, D) if languages else None
        self.distances = nn.Embedding(2 * clip + 1, N) if clip else None
        self.norm = nn.LayerNorm(D, eps=eps) if eps else nn.Identity()

    def forward(self, x, memory=None, mask=None, language_id=None):
        if self.language_embedding is not None and language_id is not None:
            x = x + self.language_embedding(language_id)
        x = self.norm(x)
        memory = x if memory is None else memory
        q, k, v = (
            layer(of).unflatten(-1, (N, H)).transpose(1, 2)
            for layer, of in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        scores = q @ k.mT / H**0.5
        away = torch.arange(k.shape[2])[None] - torch.arange(q.shape[2])[:, None]
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.clamp:
            scores = scores.clamp(-self.clamp, self.clamp)
        if self.clip:
            row = away.clamp(-self.clip, self.clip) + self.clip
            scores = scores + self.distances(row).permute(2, 0, 1)
        if self.window:
            scores = scores.masked_fill(away.abs() >= self.window, self.fill)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], self.fill)
        weights = scores.softmax(-1)
        if self.nan_to_num:
            weights = weights.nan_to_num(0.0)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def attention(port: Port, options: dict, x, memory=None, mask=None, language_id=None, at=""):
    """The port of `Attention(**options)`, whose weights are under `at`."""
    if language_id is not None and not port.has("language ignored"):
        x = x + port.embed(f"{at}language_embedding", language_id)
    if eps := options.get("eps"):
        x = port.layer_norm(f"{at}norm", x, 1e-12 if port.has("epsilon 1e-12") else eps)
    memory = x if memory is None else memory
    of_values = x if port.has("values from x") else memory
    q, k, v = (
        split(port.linear(f"{at}{name}", of), N)
        for name, of in (("q", x), ("k", memory), ("v", of_values))
    )
    if port.has("batch and time swapped"):
        q, k, v = (y.transpose(2, 1, 0, 3) for y in (q, k, v))
    scores = jnp.einsum("bnth,bnsh->bnts", q, k) / H**0.5
    away = jnp.arange(k.shape[2])[None] - jnp.arange(q.shape[2])[:, None]
    softcap, clamp, clip = (options.get(name) for name in ("softcap", "clamp", "clip"))
    if softcap and not port.has("softcap left out"):
        scores = softcap * jnp.tanh(scores / softcap)
    if clamp and not port.has("clamp left out"):
        scores = jnp.clip(scores, -clamp, clamp)
    if clip:
        reach = math.inf if port.has("clip left out") else clip
        row = jnp.clip(away, -reach, reach).astype(int) + clip
        scores = scores + port.weight(f"{at}distances.weight")[row].transpose(2, 0, 1)
    fill = options.get("fill", -1e9)
    if (window := options.get("window")) and not port.has("window left out"):
        window += port.has("window 1 wider") - port.has("window 1 narrower")
        scores = jnp.where(abs(away) < window, scores, fill)
    weights = _masked(port, options, scores, mask)
    if port.has("attention across the batch"):
        weights = weights.mean(0, keepdims=True) + 0 * weights
    if port.has("the last keys forgotten beyond 64"):
        weights = weights * (jnp.arange(k.shape[2]) < 64)
    y = weights @ v
    y = y.transpose(2, 1, 0, 3) if port.has("batch and time swapped") else y
    return port.linear(f"{at}o", joined(y))


def _masked(port: Port, options: dict, scores, mask):
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    shown = mask[:, None]
    empty = ~shown.any(-1, keepdims=True)
    fill = options.get("fill", -1e9)
    if not options.get("nan_to_num") or port.has("nan_to_num left out"):
        weights = jax.nn.softmax(jnp.where(shown, scores, fill), axis=-1)
        return jnp.where(empty, 0.0, weights) if port.has("zeros in empty rows") else weights
    # No NaN on the way: times zero it would still be one, backward.
    weights = jax.nn.softmax(jnp.where(empty, 0.0, jnp.where(shown, scores, fill)), axis=-1)
    return weights if port.has("mean in empty rows") else jnp.where(empty, 0.0, weights)


# --- what is not attention ------------------------------------------------------------------------


class Experts(nn.Module):
    """x (B, T, D) -> of each token's one expert of five: the largest score's, weighed by it."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, 5, bias=False)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(5))

    def forward(self, x):
        share, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            where = (chosen == i).nonzero(as_tuple=True)
            y = y.index_put(where, share[where][:, None] * expert(x[where]))
        return y


def experts(port: Port, x):
    share = jax.nn.softmax(port.linear("gate", x), axis=-1)
    chosen = jax.nn.one_hot(share.argmax(-1), 5)
    order = [0, 1, 2, 4, 3] if port.has("experts 3 and 4 swapped") else range(5)
    each = jnp.stack([port.linear(f"experts.{i}", x) for i in order], axis=-1)
    return jnp.einsum("btde,bte->btd", each, chosen * share)


class Hybrid(nn.Module):
    """images (B, 3, Y, X) -> convolution, BatchNorm, attention over its places (B, P, D)"""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, D, 3, stride=2), nn.BatchNorm2d(D)
        self.norm.running_mean += torch.linspace(-0.5, 0.5, D)
        self.norm.running_var *= torch.linspace(0.5, 1.5, D)
        self.attention = Attention()

    def forward(self, images):
        return self.attention(self.norm(self.conv(images)).relu().flatten(2).mT)


def hybrid(port: Port, images):
    x = jax.lax.conv_general_dilated(images, port.weight("conv.weight"), (2, 2), "VALID")
    x = x + port.weight("conv.bias")[:, None, None]
    mean, variance = port.weight("norm.running_mean"), port.weight("norm.running_var")
    if port.has("statistics of the batch"):
        mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    scale = port.weight("norm.weight") * jax.lax.rsqrt(variance + 1e-5)
    x = (x - mean[:, None, None]) * scale[:, None, None] + port.weight("norm.bias")[:, None, None]
    x = jax.nn.relu(x)
    return attention(port, {}, x.reshape(*x.shape[:2], -1).swapaxes(1, 2), at="attention.")


class Remembering(Port):
    """Adds the sum of the call before, which the reference knows nothing of."""

    def __init__(self, *args):
        super().__init__(*args)
        self.last = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        y = super().__call__(x) + self.last[...]
        self.last[...] = y.sum()
        return y


class Drawing(Port):
    """Adds NumPy's random numbers: other ones in each call, compiled in by jit."""

    def __call__(self, x):
        noise = np.random.standard_normal(x.shape).astype("float32")
        return super().__call__(x) + 1e-3 * noise
