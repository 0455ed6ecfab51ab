"""Kinds of masks: the inputs of both sides, and their meaning for the oracle. NumPy only."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jax_attn.selfcheck.matrix.cases import Size

Masks = dict[str, np.ndarray]

WINDOW = (2, 1)  # the number of keys that a query sees to its left and to its right
DROPPED = 0.25  # the part of the weights that rows with dropout drop


def _never_empty(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Allow half of all keys at random, and at least one for each query."""
    allowed = rng.random(shape) < 0.5
    first = rng.integers(shape[-1], size=shape[:-1])
    np.put_along_axis(allowed, first[..., None], True, axis=-1)
    return allowed


def _with_empty_row(rng: np.random.Generator, size: Size) -> np.ndarray:
    allowed = _never_empty(rng, (size.B, 1, size.T, size.S))
    allowed[0, :, size.T // 2] = False
    return allowed


def _lengths(rng: np.random.Generator, size: Size) -> np.ndarray:
    """Draw lengths with padding in every row except the first, which has all its keys."""
    lengths = rng.integers(1, size.S, size=size.B, endpoint=True)
    lengths[0] = size.S
    if size.B > 1 and size.S > 1:
        lengths[1] = (size.S + 1) // 2
    return lengths.astype(np.int32)


@dataclass(frozen=True)
class MaskKind:
    """A kind of mask. inputs: what both sides are given. allowed: its meaning, BNTS or None."""

    inputs: Callable[[np.random.Generator, Size], Masks]
    allowed: Callable[[Masks, Size], np.ndarray | None]


def distance(size: Size) -> np.ndarray:
    """Return (T, S): how far key j lies to the right of query i, j - i."""
    return np.arange(size.S)[None, :] - np.arange(size.T)[:, None]


MASKS = {
    "none": MaskKind(lambda rng, size: {}, lambda m, size: None),
    "causal": MaskKind(lambda rng, size: {}, lambda m, size: distance(size) <= 0),
    "padding": MaskKind(
        lambda rng, size: {"lengths": _lengths(rng, size)},
        lambda m, size: (np.arange(size.S) < m["lengths"][:, None])[:, None, None],
    ),
    "per_head": MaskKind(
        lambda rng, size: {"allowed": _never_empty(rng, (size.B, size.N, size.T, size.S))},
        lambda m, size: m["allowed"],
    ),
    "zero_one": MaskKind(
        lambda rng, size: {
            "zero_one": _never_empty(rng, (size.B, size.T, size.S)).astype(np.int32)
        },
        lambda m, size: m["zero_one"][:, None] == 1,
    ),
    "bias": MaskKind(
        lambda rng, size: {"bias": rng.standard_normal((size.B, size.N, size.T, size.S))},
        lambda m, size: None,
    ),
    "window": MaskKind(
        lambda rng, size: {},
        lambda m, size: (-WINDOW[0] <= distance(size)) & (distance(size) <= WINDOW[1]),
    ),
    "empty_row": MaskKind(
        lambda rng, size: {"allowed": _with_empty_row(rng, size)}, lambda m, size: m["allowed"]
    ),
    "sliding": MaskKind(
        lambda rng, size: {}, lambda m, size: (-WINDOW[0] <= distance(size)) & (distance(size) <= 0)
    ),
    "causal_padding": MaskKind(
        lambda rng, size: {"lengths": _lengths(rng, size)},
        lambda m, size: (
            (np.arange(size.S) < m["lengths"][:, None])[:, None, None] & (distance(size) <= 0)
        ),
    ),
    "dropout": MaskKind(
        lambda rng, size: {"keep": rng.random((size.B, size.N, size.T, size.S)) >= DROPPED},
        lambda m, size: None,
    ),
}
