"""A small attention under a mask that is written as models write it, in torch and in NNX."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from jax_attn.transfer import LINEAR, Layout, load

S, D, H = 5, 11, 7
LAYOUT = Layout(*(LINEAR.under(name, name) for name in "qkv"))

# form -> scores, where a key is hidden, fill, the library -> masked scores.
FORMS = {
    "filled": lambda scores, hidden, fill, xp: xp.where(hidden, fill, scores),
    "filled, then divided": lambda scores, hidden, fill, xp: xp.where(hidden, fill, scores) / 1.7,
    "added": lambda scores, hidden, fill, xp: scores + xp.where(hidden, fill, 0 * fill),
    "a product added": lambda scores, hidden, fill, xp: (
        scores + (1.0 - xp.where(hidden, 0 * fill, 0 * fill + 1)) * fill
    ),
    "two added": lambda scores, hidden, fill, xp: (
        scores
        + (
            xp.where(hidden, fill, 0 * fill)
            + xp.where(hidden & (xp.arange(S) > S // 2), fill, 0 * fill)
        )
    ),
    "-inf added, too": lambda scores, hidden, fill, xp: (
        scores
        + xp.where(hidden, fill, 0 * fill)
        + xp.where(hidden & (xp.arange(S) > S // 2), -xp.inf, 0 * fill)
    ),
}


class Torch(nn.Module):
    def __init__(self, form, fill):
        super().__init__()
        self.form, self.fill = FORMS[form], fill
        for name in "qkv":
            setattr(self, name, nn.Linear(D, H))

    def forward(self, x, hidden):
        q, k, v = self.q(x), self.k(x), self.v(x)
        fill = torch.finfo(x.dtype).min if self.fill is None else self.fill
        fill = torch.tensor(fill, dtype=x.dtype)
        scores = self.form(q @ k.transpose(-1, -2), hidden, fill, torch)
        return torch.softmax(scores, -1) @ v


class Flax(nnx.Module):
    def __init__(self, form, fill, dtype, zeros=False):
        self.form, self.fill, self.zeros = FORMS[form], fill, zeros
        for name in "qkv":
            setattr(self, name, nnx.Linear(D, H, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0)))

    def __call__(self, x, hidden):
        q, k, v = self.q(x), self.k(x), self.v(x)
        fill = jnp.array(jnp.finfo(x.dtype).min if self.fill is None else self.fill, x.dtype)
        scores = self.form(q @ k.swapaxes(-1, -2), hidden, fill, jnp)
        weights = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(x.dtype)
        if self.zeros:
            weights = jnp.where(hidden.all(-1, keepdims=True), 0, weights)
        return weights @ v


def pair(form, fill, dtype="float32", zeros=False):
    torch.manual_seed(0)
    theirs = Torch(form, fill).to(getattr(torch, dtype))
    ours = Flax(form, fill, getattr(jnp, dtype), zeros)
    load(ours, theirs.state_dict(), LAYOUT)
    return theirs, ours


def inputs():
    """x, and a mask that hides a random third of the keys, and every key of one row."""
    rng = np.random.default_rng(0)
    hidden = rng.random((2, S, S)) < 0.35
    hidden[..., 0] = False
    hidden[0, 3] = True
    return rng.standard_normal((2, S, D)), hidden
