"""One training run in either framework, on gradients that both are given, and by definition."""

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import optax
import torch
from flax import nnx

from jax_attn import GroupedQueryAttention, transfer
from torch_ref import DESIGNS

N, K, H, D = 6, 3, 5, 13
LAYOUT = transfer.LAYOUTS["gqa"]
BEFORE, AFTER = 3, 4
STEPS = BEFORE + AFTER
# Not the default b2 = 0.999, where optax's 1 - b2ᵗ in float32 alone would be the error.
LR, MOMENTUM, BETAS, EPS, DECAY = 0.05, 0.9, (0.8, 0.95), 1e-6, 0.1
B1, B2 = BETAS

U = 2.0**-53
ROUNDINGS = 24
"""What a number meets in one step, at most. Adam: decay 2; m 4, with 1 - b1's own; its
correction 2; v 5, its correction 2 and the root 1, of which the root halves all but the last;
eps 1; the quotient, times lr, off the parameter 4; a decoupled decay 4. SGD meets fewer."""
CORRECTIONS = 2 * B1 / (1 - B1) + B2 / (1 - B2)
"""1 - bᵗ loses what bᵗ was off by, twice u, as many times as bᵗ is larger: most at t = 1."""


class Row(NamedTuple):
    """An optimizer on both sides, and what its definition takes."""

    torch: Callable[[torch.nn.Module], torch.optim.Optimizer]
    optax: optax.GradientTransformation
    adam: bool
    coupled: float = 0.0
    decoupled: float = 0.0
    nesterov: bool = False
    biases_decay: bool = True


def two_groups(module):
    """The usual two: weights decay, biases do not. The ids are not named_parameters()' order."""
    weights, biases = (
        [p for name, p in module.named_parameters() if name.endswith(kind)]
        for kind in ("weight", "bias")
    )
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, LR, BETAS, EPS, DECAY)


def kinds(params):
    return {path: path.rsplit(".", 1)[-1] for path in params}


SGD = functools.partial(optax.sgd, LR, MOMENTUM)
ADAM = functools.partial(optax.adam, LR, B1, B2, EPS)
ADAMW = functools.partial(optax.adamw, LR, B1, B2, EPS)
ROWS = {
    "momentum": Row(lambda m: torch.optim.SGD(m.parameters(), LR, MOMENTUM), SGD(), adam=False),
    "nesterov with decay": Row(
        lambda m: torch.optim.SGD(m.parameters(), LR, MOMENTUM, 0, DECAY, nesterov=True),
        optax.chain(optax.add_decayed_weights(DECAY), SGD(nesterov=True)),
        adam=False,
        coupled=DECAY,
        nesterov=True,
    ),
    "Adam": Row(lambda m: torch.optim.Adam(m.parameters(), LR, BETAS, EPS), ADAM(), adam=True),
    "Adam with decay": Row(
        lambda m: torch.optim.Adam(m.parameters(), LR, BETAS, EPS, DECAY),
        optax.chain(optax.add_decayed_weights(DECAY), ADAM()),
        adam=True,
        coupled=DECAY,
    ),
    "AdamW": Row(
        lambda m: torch.optim.AdamW(m.parameters(), LR, BETAS, EPS, DECAY),
        ADAMW(weight_decay=DECAY),
        adam=True,
        decoupled=DECAY,
    ),
    "AdamW, two groups": Row(
        two_groups,
        optax.partition({"kernel": ADAMW(weight_decay=DECAY), "bias": ADAM()}, kinds),
        adam=True,
        decoupled=DECAY,
        biases_decay=False,
    ),
}


def by_definition(row, key, p, gradients):
    """One parameter after every gradient, and what it may be off by; both float64.

    Each step is linear in gradients and parameter, but for Adam's denominator: the same sums of
    absolute values, times the roundings of all steps, bound the error.
    """
    decays = row.biases_decay or not key.endswith("bias")
    coupled, decoupled = row.coupled * decays, row.decoupled * decays
    size, m, m_size, v = np.abs(p), 0.0, 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        g_size, g = np.abs(g) + coupled * size, g + coupled * p
        if row.adam:
            m, m_size = B1 * m + (1 - B1) * g, B1 * m_size + (1 - B1) * g_size
            v = B2 * v + (1 - B2) * g**2
            under = (np.sqrt(v / (1 - B2**t)) + EPS) * (1 - B1**t)
            off, off_size = m / under, m_size / under
        else:
            m, m_size = MOMENTUM * m + g, MOMENTUM * m_size + g_size
            off, off_size = m, m_size
            if row.nesterov:
                off, off_size = g + MOMENTUM * m, g_size + MOMENTUM * m_size
        size = size + LR * (off_size + decoupled * size)
        p = p - LR * (off + decoupled * p)
    return p, U * (ROUNDINGS * len(gradients) + CORRECTIONS * row.adam) * size


@contextlib.contextmanager
def strictly():
    """Around our own code: no dtype changes unasked, no warning."""
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("strict"):
        warnings.simplefilter("error")
        yield


def load(*args, **options):
    with strictly():
        return transfer.load_optimizer(*args, **options)


def export(*args):
    with strictly():
        return transfer.export_optimizer(*args)


@functools.cache
def shapes(width=D):
    module = nnx.eval_shape(
        lambda: GroupedQueryAttention(width, N, K, head_dim=H, rngs=nnx.Rngs(0))
    )
    return {path: array.shape for path, array in transfer.flatten(module).items()}


def drawn(seed, width=D, dtype=np.float64):
    """A number of order 1 for every parameter, by torch key."""
    rng = np.random.default_rng(seed)
    flat = {path: rng.standard_normal(shape) for path, shape in sorted(shapes(width).items())}
    return {key: np.array(a, dtype, order="C") for key, a in LAYOUT.to_torch(flat).items()}


def torch_module(weights, width=D):
    module = DESIGNS["gqa"](width, N, K, head_dim=H).double()
    module.load_state_dict({key: torch.from_numpy(a.copy()) for key, a in weights.items()})
    return module


def names_of(module, optimizer):
    name = {id(p): key for key, p in module.named_parameters()}
    return [[name[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def torch_weights(module):
    return {key: p.detach().numpy().copy() for key, p in module.named_parameters()}


def to_flax(tensors, width=D):
    flat = LAYOUT.to_flax(tensors, shapes(width))
    return {path: jax.numpy.array(array) for path, array in flat.items()}


def go_on_in_torch(module, optimizer, gradients):
    for gradient in gradients:
        for key, p in module.named_parameters():
            p.grad = torch.from_numpy(gradient[key].copy())
        optimizer.step()


@functools.lru_cache
def updating(tx):
    @jax.jit
    def update(params, state, gradient):
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return update


def go_on_in_optax(tx, params, state, gradients):
    for gradient in gradients:
        params, state = updating(tx)(params, state, gradient)
    return params, state
