"""Inputs of three qualities, all of the shapes of those that reveal most."""

from collections.abc import Callable, Mapping

import numpy as np

Inputs = Mapping[str, np.ndarray]


AS_THEY_ARE = ("position_ids", "token_type_ids")


def all_ones(inputs: Inputs) -> Inputs:
    """Numbers and ids that are all 1, and masks that hide nothing, as in many a first test."""
    return {
        name: _usual(name, a) if name in AS_THEY_ARE else np.ones_like(a)
        for name, a in inputs.items()
    }


def _usual(name: str, a: np.ndarray) -> np.ndarray:
    """Positions that count from 0, and token types that are all 0."""
    return np.broadcast_to(np.arange(a.shape[-1]) * (name == "position_ids"), a.shape).astype(
        a.dtype
    )


def at_random(inputs: Inputs) -> Inputs:
    """Standard normal numbers and uniform ids, and masks that hide nothing."""
    rng = np.random.default_rng(1)

    def drawn(name: str, a: np.ndarray) -> np.ndarray:
        if a.dtype.kind == "b" or "mask" in name:
            return np.ones_like(a)
        if name in AS_THEY_ARE:
            return _usual(name, a)
        if a.dtype.kind in "iu":
            return rng.integers(a.max() + 1, size=a.shape).astype(a.dtype)
        return rng.standard_normal(a.shape).astype(a.dtype)

    return {name: drawn(name, a) for name, a in inputs.items()}


QUALITIES: dict[str, Callable[[Inputs], Inputs]] = {
    "ones": all_ones,
    "random": at_random,
    "suggested": dict,
}
