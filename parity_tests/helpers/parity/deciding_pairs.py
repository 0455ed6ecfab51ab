"""Small modules that decide: buckets of distances, and experts, in torch and in NNX."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from jax_attn.transfer import EMBEDDING, LINEAR, Layout, load

T, D, BUCKETS, FARTHEST = 19, 7, 8, 64
EXPERTS, CHOSEN = 5, 2


def buckets(xp, distance, to_float, to_int):
    """MPNet's: half the buckets hold one distance each, the others logarithmically many."""
    exact = BUCKETS // 2
    log = xp.log(to_float(xp.where(distance < 1, 1, distance)) / exact)
    far = exact + to_int(log / math.log(FARTHEST / exact) * (BUCKETS - exact))
    return xp.where(distance < exact, distance, xp.where(far < BUCKETS, far, BUCKETS - 1))


class TorchBuckets(nn.Module):
    """Attention of scalars with a bias by bucket. frozen: the buckets are a table."""

    def __init__(self, frozen=False):
        super().__init__()
        self.bias, self.value = nn.Embedding(BUCKETS, 1), nn.Linear(D, D)
        positions = torch.arange(T)
        self.register_buffer("distance", (positions[:, None] - positions).abs(), persistent=False)
        self.table = self.bucket() if frozen else None

    def bucket(self):
        return buckets(torch, self.distance, lambda n: n.float(), lambda x: x.to(torch.long))

    def forward(self, x):
        bucket = self.bucket() if self.table is None else self.table
        weights = torch.softmax(x @ x.mT + self.bias(bucket)[..., 0], -1)
        return weights @ self.value(x)


class FlaxBuckets(nnx.Module):
    """off_by_one: distances are one too large."""

    def __init__(self, off_by_one=False):
        rngs = nnx.Rngs(0)
        self.bias = nnx.Embed(BUCKETS, 1, rngs=rngs)
        self.value = nnx.Linear(D, D, rngs=rngs)
        self.off_by_one = off_by_one

    def __call__(self, x):
        distance = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T)) + self.off_by_one
        bucket = buckets(
            jnp, distance, lambda n: n.astype(jnp.float32), lambda a: a.astype(jnp.int32)
        )
        weights = jax.nn.softmax(x @ x.swapaxes(-1, -2) + self.bias(bucket)[..., 0], -1)
        return weights @ self.value(x)


class TorchExperts(nn.Module):
    """A gate, and the two experts of each token that it chooses, weighted by a softmax."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, EXPERTS)
        for i in range(EXPERTS):
            setattr(self, f"expert{i}", nn.Linear(D, D))

    def forward(self, x):
        weight, chosen = torch.topk(torch.softmax(self.gate(x), -1), CHOSEN, -1)
        outputs = torch.stack([getattr(self, f"expert{i}")(x) for i in range(EXPERTS)], -2)
        outputs = torch.tanh(outputs).take_along_dim(chosen[..., None], -2)
        return (weight[..., None] * outputs).sum(-2)


class FlaxExperts(nnx.Module):
    """swapped: each of the two experts has the other's weight."""

    def __init__(self, swapped=False):
        self.gate = nnx.Linear(D, EXPERTS, rngs=nnx.Rngs(0))
        for i in range(EXPERTS):
            setattr(self, f"expert{i}", nnx.Linear(D, D, rngs=nnx.Rngs(0)))
        self.swapped = swapped

    def __call__(self, x):
        weight, chosen = jax.lax.top_k(jax.nn.softmax(self.gate(x), -1), CHOSEN)
        chosen = chosen[..., ::-1] if self.swapped else chosen
        outputs = jnp.stack([getattr(self, f"expert{i}")(x) for i in range(EXPERTS)], -2)
        outputs = jnp.take_along_axis(jnp.tanh(outputs), chosen[..., None], -2)
        return (weight[..., None] * outputs).sum(-2)


BUCKETS_LAYOUT = Layout(EMBEDDING.under("bias", "bias"), LINEAR.under("value", "value"))
EXPERTS_LAYOUT = Layout(LINEAR.under("gate", "gate"), LINEAR.under("expert{i}", "expert{i}"))


def loaded(reference, port, layout):
    """Both, with the reference's weights, drawn by its seed."""
    load(port, reference.state_dict(), layout)
    return reference, port


def tokens():
    return np.random.default_rng(0).standard_normal((2, T, D))
