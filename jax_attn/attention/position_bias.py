"""Biases that follow from the positions of query and key, for models without rotary positions.

ALiBi: a score falls with the distance, in each head by a slope of its own (Press et al., "Train
Short, Test Long", 2022). T5: distances fall into buckets, each with a learned number a head
(Raffel et al., "Exploring the Limits of Transfer Learning", 2020).
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_attn.attention import checks


@dataclasses.dataclass(frozen=True)
class Alibi:
    """ALiBi of num_heads heads, its slopes multiplied by factor: called as (T, S) -> (N, 1, S).

    Raises ArgumentError unless num_heads is an int ≥ 1 and factor a finite number > 0.
    """

    num_heads: int
    factor: float = 1.0

    def __post_init__(self) -> None:
        problems = checks.count_problems(num_heads=self.num_heads)
        if not (checks.is_real(self.factor) and self.factor > 0):
            got = checks.summary(self.factor)
            problems.append(f"factor: expected a finite number > 0, got {got}")
        checks.raise_all("Alibi", problems)

    def __call__(self, T: int, S: int) -> Float[Array, "N 1 S"]:
        return alibi(self.num_heads, S, factor=self.factor)


def alibi(num_heads: int, length: int, *, factor: float = 1.0) -> Float[Array, "N 1 S"]:
    """factor · slope · (j − (S − 1)) for head n and key j of S = length; (N, 1, S), as bias=.

    A query at i wants j − i in place of j − (S − 1); the two differ by one number for all its
    keys, which cancels in the softmax. So nothing T×S is written out, and it does not matter on
    which side a row is padded. In float32, or float64 where x64 is on, rounded once. For causal
    attention only: the score of a key after the query would rise.
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
    """T5's bucket for each distance j − i of key from query, an array of integers.

    The nearest half of the buckets have a distance each; the others grow evenly on a logarithmic
    scale up to max_distance, and the last has all beyond. bidirectional: keys after the query have
    as many buckets of their own, the second half; else they share that of distance 0. Rounded as
    transformers rounds, in float32.
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
    """What is wrong with these as numbers of `relative_buckets`."""
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
        more = f"more than the {near} near ones"
        problems.append(f"max_distance: expected {more}, got {max_distance}")
    return problems


def alibi_slopes(num_heads: int) -> Float[np.ndarray, " N"]:
    """2^(−8n/N) for head n = 1 … N where N is a power of two; (N,) in float64.

    Else those of the largest power of two below it, then every other one of twice as many.
    """
    most = 2 ** int(math.log2(num_heads))

    def geometric(count: int) -> np.ndarray:
        return 2.0 ** (-8 / count * np.arange(1, count + 1))

    return np.concatenate([geometric(most), geometric(2 * most)[::2][: num_heads - most]])
