"""Biases computed from the positions of query and key, for models without rotary positions.

ALiBi: a score falls linearly with the distance; each head has its own slope (Press et al., "Train
Short, Test Long", 2022). T5: distances fall into buckets, each with a learned bias for each head
(Raffel et al., "Exploring the Limits of Transfer Learning", 2020).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_attn.attention import checks
from jax_attn.attention.annotations import AnyArray


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["slopes"],
    meta_fields=["factor", "rounded"],
)
@dataclasses.dataclass(frozen=True)
class KeySlopes:
    """The slope of each head, (N,), and what else decides on the bias, as in `Alibi`."""

    slopes: jax.Array
    factor: float
    rounded: bool

    def between(
        self, queries: Int[AnyArray, "B T"], keys: Int[AnyArray, "B S"]
    ) -> Float[Array, "B N 1 S"]:
        """Return the bias of these keys, which is the same for every query."""
        return self.bias(keys)

    def bias(self, positions: Int[AnyArray, "B S"]) -> Float[Array, "B N 1 S"]:
        """Return factor · slope · the key's position, in the slopes' dtype.

        That a query's own position is missing cancels in the softmax.
        """
        keys_B11S = self._stored(jnp.asarray(positions, self.slopes.dtype))[:, None, None]
        return self.factor * self._stored(self.slopes[None, :, None, None] * keys_B11S)

    def _stored(self, x: jax.Array) -> jax.Array:
        """Round to bfloat16. XLA may leave out a cast to it and back."""
        bits = jnp.finfo(jnp.bfloat16)
        return jax.lax.reduce_precision(x, bits.nexp, bits.nmant) if self.rounded else x


@functools.partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["lowest"])
@dataclasses.dataclass(frozen=True)
class DistanceBias:
    """A bias for each head and each distance of a key from its query.

    rows: (N, R), the biases for the distances lowest, lowest + 1, …; those beyond either end have
    the bias of that end.
    """

    rows: Float[Array, "N R"]
    lowest: int

    # Distances are the same from wherever positions count.
    rounded = False

    def between(
        self, queries: Int[AnyArray, "B T"], keys: Int[AnyArray, "B S"]
    ) -> Float[Array, "B N T S"]:
        """Return the bias of each key for each query, by their positions."""
        row_BTS = keys[:, None, :] - queries[:, :, None] - self.lowest
        return jnp.take(self.rows, row_BTS, axis=1, mode="clip").swapaxes(0, 1)


@dataclasses.dataclass(frozen=True)
class Alibi:
    """ALiBi for num_heads heads, slopes multiplied by factor; call it as (T, S) -> (N, 1, S).

    rounded: slopes and their products with positions are rounded to bfloat16, as in Falcon.

    Raises ArgumentError unless num_heads is an int ≥ 1, factor a finite number > 0 and rounded a
    bool.
    """

    num_heads: int
    factor: float = 1.0
    rounded: bool = False

    def __post_init__(self) -> None:
        problems = checks.count_problems(num_heads=self.num_heads)
        if not (checks.is_real(self.factor) and self.factor > 0):
            got = checks.summary(self.factor)
            problems.append(f"factor: expected a finite number > 0, got {got}")
        if not isinstance(self.rounded, bool):
            problems.append(f"rounded: expected True or False, got {checks.summary(self.rounded)}")
        checks.raise_all("Alibi", problems)

    def __call__(self, T: int, S: int) -> Float[Array, "N 1 S"]:
        if self.rounded:
            return self.slopes.bias(jnp.arange(S)[None])[0]
        return alibi(self.num_heads, S, factor=self.factor)

    @property
    def slopes(self) -> KeySlopes:
        """The slopes, of JAX's default floating-point dtype."""
        slopes_N = alibi_slopes(self.num_heads)
        if self.rounded:
            slopes_N = slopes_N.astype(jnp.bfloat16).astype(np.float64)
        return KeySlopes(jnp.asarray(slopes_N), self.factor, self.rounded)


def alibi_problems(alibi: object, num_heads: int) -> list[str]:
    """Say why a value is no Alibi of this many heads, nor None."""
    if alibi is None or (isinstance(alibi, Alibi) and alibi.num_heads == num_heads):
        return []
    return [f"alibi: expected None or an Alibi of {num_heads} heads, got {alibi!r}"]


def distance_problems(distances: object, num_heads: int) -> list[str]:
    """Say why a value is no DistanceBias of this many heads, nor None."""
    if distances is None:
        return []
    if isinstance(distances, DistanceBias) and distances.rows.shape[0] == num_heads:
        return []
    got = f"one of {distances.rows.shape[0]}" if isinstance(distances, DistanceBias) else distances
    return [f"distances: expected None or a DistanceBias of {num_heads} heads, got {got}"]


def alibi(num_heads: int, length: int, *, factor: float = 1.0) -> Float[Array, "N 1 S"]:
    """Return factor · slope · (j − (S − 1)) for head n and key j, S = length: (N, 1, S), for bias=.

    The definition has j − i for a query at i. The difference is the same for all keys of a query
    and cancels in the softmax. So no T×S array is written, and padding may be on either side. The
    result is float32, or float64 if x64 is on, rounded once. For causal attention only: the score
    of a key after the query would rise.
    """
    distance_S = np.arange(length) - (length - 1)
    return jnp.asarray(factor * alibi_slopes(num_heads)[:, None, None] * distance_S)


def relative_buckets(
    distance: Int[np.ndarray, "*shape"],
    *,
    buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
) -> Int[np.ndarray, "*shape"]:
    """Return T5's bucket for each distance j − i of key from query, an array of integers.

    The nearer half of the buckets hold one distance each; the others grow evenly on a logarithmic
    scale up to max_distance, and the last holds all larger distances. bidirectional: keys after the
    query have as many buckets of their own, the second half; otherwise they share the bucket of
    distance 0. Rounded in float32, as in transformers.
    """
    count = buckets // 2 if bidirectional else buckets
    away = np.abs(distance) if bidirectional else np.maximum(-distance, 0)
    near = count // 2
    ratio = np.log(np.maximum(away, 1).astype(np.float32) / np.float32(near))
    steps = ratio / np.float32(math.log(max_distance / near)) * np.float32(count - near)
    far = np.minimum(near + steps.astype(int), count - 1)
    first = count * (distance > 0) if bidirectional else 0
    return first + np.where(away < near, away, far)


def bucket_problems(buckets: Any, max_distance: Any, bidirectional: object) -> list[str]:
    """Say what is wrong with these arguments of `relative_buckets`."""
    problems = checks.count_problems(buckets=buckets, max_distance=max_distance)
    if not isinstance(bidirectional, bool):
        got = checks.summary(bidirectional)
        problems.append(f"bidirectional: expected True or False, got {got}")
    if problems:
        return problems
    least = 4 if bidirectional else 2
    if buckets < least:
        problems.append(f"buckets: expected an int ≥ {least}, got {buckets}")
    elif max_distance <= (near := buckets // least):
        more = f"more than the {near} nearest distances"
        problems.append(f"max_distance: expected {more}, got {max_distance}")
    return problems


def alibi_slopes(num_heads: int) -> Float[np.ndarray, " N"]:
    """Return the slope of each head, (N,) float64: 2^(−8n/N), n = 1 … N, if N is a power of two.

    Otherwise return the slopes of the largest power of two below N, then every other slope of twice
    that power.
    """
    most = 2 ** int(math.log2(num_heads))

    def geometric(count: int) -> np.ndarray:
        return 2.0 ** (-8 / count * np.arange(1, count + 1))

    return np.concatenate([geometric(most), geometric(2 * most)[::2][: num_heads - most]])
