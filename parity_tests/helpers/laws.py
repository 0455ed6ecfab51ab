"""What holds of attention whoever computes it: laws, as functions of a `Side`.

A law draws its arrays, asks the side twice, and gives both answers and how far apart rounding
lets them be: each is off by at most its `forward_budget`, and exactly they are equal. So that
nothing is rounded before the side sees it, what is drawn lies on a grid of 1/1024.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from helpers.attention import attention_definition as definition

B, T, S, N, K, H, HV = 2, 5, 7, 6, 3, 11, 13
G = N // K
CHUNKS = (5, 1, 1)
# What a `Draw` is made of.
DRAWN = {"seed": st.integers(0, 2**32 - 1), "size": st.sampled_from([0.25, 1.0, 3.0])}


@dataclasses.dataclass(frozen=True)
class Side:
    """attend(q, k, v, *, allowed, bias (B, N, T, S), causal) -> (B, T, N, Hv): attention.

    cached(q, k, v): the same, causal, with the tokens read in `CHUNKS`; None: there is no cache.
    """

    attend: Callable[..., np.ndarray]
    cached: Callable[..., np.ndarray] | None = None


def everything(q, k) -> tuple[np.ndarray, np.ndarray]:
    """The mask that hides nothing, the bias that adds nothing."""
    shape = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    return np.ones(shape, bool), np.zeros(shape, np.float32)


def excess(one, other, allowed) -> float:
    """The largest difference, in units of what is allowed; 1 is the limit."""
    difference = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))
    worst = np.where(difference == 0, 0.0, np.inf)
    np.divide(difference, allowed, out=worst, where=np.broadcast_to(allowed, worst.shape) > 0)
    return float(np.where(np.isfinite(difference), worst, np.inf).max())


class Draw:
    """Seeded arrays, of standard deviation `size`."""

    def __init__(self, seed: int, size: float = 1.0):
        self.rng, self.size = np.random.default_rng(seed), size

    def on_grid(self, *shape, size=1.0) -> np.ndarray:
        x = size * self.rng.standard_normal(shape)
        return (np.round(1024 * x) / 1024).astype(np.float32)

    def arrays(self, length=T, keys=S, kv_heads=K):
        """query, key, value."""
        shapes = (B, length, N, H), (B, keys, kv_heads, H), (B, keys, kv_heads, HV)
        return [self.on_grid(*shape, size=self.size) for shape in shapes]

    def options(self) -> dict[str, np.ndarray]:
        """A bias, and a mask that leaves every query a key."""
        allowed = self.rng.random((B, N, T, S)) < 0.7
        np.put_along_axis(allowed, self.rng.integers(0, S, (B, N, T, 1)), True, axis=-1)
        return {"bias": self.on_grid(B, N, T, S), "allowed": allowed}


def budget(q, k, v, **options) -> np.ndarray:
    return definition.forward_budget("float32", q, k, v, **options)[0]


# --- the laws ---------------------------------------------------------------------------------


def logit_shift(side: Side, draw: Draw):
    """A number added to all scores of a row leaves the output."""
    arrays, given = draw.arrays(), draw.options()
    shift = draw.rng.integers(-8, 9, (B, N, T, 1)).astype(np.float32)
    shifted = given | {"bias": given["bias"] + shift}
    allowed = budget(*arrays, **given) + budget(*arrays, **shifted)
    return side.attend(*arrays, **given), side.attend(*arrays, **shifted), allowed


def key_permutation(side: Side, draw: Draw):
    """Keys have no order: moved with their values, bias and mask they give the same."""
    (q, k, v), given, order = draw.arrays(), draw.options(), draw.rng.permutation(S)
    moved = {name: x[..., order] for name, x in given.items()}
    other = side.attend(q, k[:, order], v[:, order], **moved)
    return side.attend(q, k, v, **given), other, 2 * budget(q, k, v, **given)


def batch_equivariance(side: Side, draw: Draw):
    """A row of the batch sees no other: moved, it gives the same in its new place."""
    arrays, given, order = draw.arrays(), draw.options(), np.roll(np.arange(B), 1)
    moved = {name: x[order] for name, x in given.items()}
    other = side.attend(*(x[order] for x in arrays), **moved)
    return side.attend(*arrays, **given)[order], other, 2 * budget(*arrays, **given)[order]


def head_equivariance(side: Side, draw: Draw):
    """A key/value head with its query heads likewise; and these among themselves."""
    (q, k, v), given = draw.arrays(), draw.options()
    groups = np.roll(np.arange(K), draw.rng.integers(1, K))
    heads = (G * groups[:, None] + draw.rng.permutation(G)).ravel()
    moved = {name: x[:, heads] for name, x in given.items()}
    other = side.attend(q[:, :, heads], k[:, :, groups], v[:, :, groups], **moved)
    allowed = 2 * budget(q, k, v, **given)
    return side.attend(q, k, v, **given)[:, :, heads], other, allowed[:, :, heads]


def mask_is_deletion(side: Side, draw: Draw):
    """A key that nobody may attend to might as well not be there."""
    (q, k, v), bias = draw.arrays(), draw.options()["bias"]
    kept = np.sort(draw.rng.choice(S, T, replace=False))
    allowed = np.broadcast_to(np.isin(np.arange(S), kept), (B, N, T, S))
    masked = {"bias": bias, "allowed": allowed}
    deleted = q, k[:, kept], v[:, kept]
    one, other = side.attend(q, k, v, **masked), side.attend(*deleted, bias=bias[..., kept])
    return one, other, budget(q, k, v, **masked) + budget(*deleted, bias=bias[..., kept])


def duplicated_key(side: Side, draw: Draw):
    """A key that is there twice counts as once with log 2 added to its score."""
    q, k, v = draw.arrays(keys=T)
    twice = draw.rng.choice(T, S - T, replace=False)
    order = draw.rng.permutation([*range(T), *twice])
    bias = np.zeros((B, N, T, T), np.float32)
    bias[..., twice] = math.log(2)
    one, other = side.attend(q, k[:, order], v[:, order]), side.attend(q, k, v, bias=bias)
    # log 2 is no float32: the weights are off, relatively, by twice what it is off.
    off = 2 * abs(float(np.float32(math.log(2))) - math.log(2))
    rounded = off * definition.attend(q, k, np.abs(v), bias=bias)[0]
    allowed = budget(q, k[:, order], v[:, order]) + budget(q, k, v, bias=bias) + rounded
    return one, other, allowed


def linear_in_value(side: Side, draw: Draw):
    """Values weighted and added give outputs weighted and added."""
    (q, k, v), given = draw.arrays(), draw.options()
    (_, _, w), (a, b) = draw.arrays(), draw.rng.integers(1, 4, 2) * (1, -1)
    mixed = (a * v + b * w).astype(np.float32)
    first, second = (side.attend(q, k, x, **given).astype(np.float64) for x in (v, w))
    parts = ((1, mixed), (a, v), (b, w))
    allowed = sum(abs(factor) * budget(q, k, x, **given) for factor, x in parts)
    return side.attend(q, k, mixed, **given), a * first + b * second, allowed


def causal(q, k) -> np.ndarray:
    return np.tril(everything(q, k)[0])


def causal_prefix(side: Side, draw: Draw):
    """What comes later changes nothing: the first of a text give what they give alone."""
    whole = draw.arrays(length=S)
    prefix = [x[:, :T] for x in whole]
    allowed = [budget(*x, allowed=causal(*x[:2])) for x in (whole, prefix)]
    one, other = (side.attend(*x, causal=True) for x in (whole, prefix))
    return one[:, :T], other, allowed[0][:, :T] + allowed[1]


def cache_is_full_pass(side: Side, draw: Draw):
    """A text read in pieces gives what it gives read at once."""
    arrays = draw.arrays(length=S)
    allowed = 2 * budget(*arrays, allowed=causal(*arrays[:2]))
    return side.cached(*arrays), side.attend(*arrays, causal=True), allowed


def grouped_is_repeated(side: Side, draw: Draw):
    """Grouped heads are as many key/value heads, repeated: multi-query of one, multi-head of N."""
    (q, k, v), given = draw.arrays(), draw.options()
    found = []
    for heads in (1, K):
        k_few, v_few = k[:, :, :heads], v[:, :, :heads]
        repeated = (np.repeat(x, N // heads, axis=2) for x in (k_few, v_few))
        pair = side.attend(q, k_few, v_few, **given), side.attend(q, *repeated, **given)
        found.append((*pair, 2 * budget(q, k_few, v_few, **given)))
    return tuple(map(np.stack, zip(*found, strict=True)))


def same_bits_again(side: Side, draw: Draw):
    """The same call gives the same bits."""
    arrays, given = draw.arrays(), draw.options()
    one, other = side.attend(*arrays, **given), side.attend(*arrays, **given)
    return one, other, np.zeros(one.shape)


LAWS = {
    law.__name__.replace("_", " "): law
    for law in (
        logit_shift,
        key_permutation,
        batch_equivariance,
        head_equivariance,
        mask_is_deletion,
        duplicated_key,
        linear_in_value,
        causal_prefix,
        cache_is_full_pass,
        grouped_is_repeated,
        same_bits_again,
    )
}
