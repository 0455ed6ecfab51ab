"""Where in a tensor the error sits: maps of its last two axes, coarse enough to be seen at once."""

from typing import NamedTuple, TypeAlias

import numpy as np

from jax_attn.parity.judge.figures import over

MAPS, ROWS, COLUMNS = 6, 16, 32
"""The most of each: of heads, or of whatever the axis before the last two holds."""

Cells: TypeAlias = tuple[tuple[float, ...], ...]
"""Rows of cells, each the largest error over its budget that any element there has."""


class Map(NamedTuple):
    """place: of the axis before the last two."""

    place: int
    cells: Cells


def maps(want: np.ndarray, got: np.ndarray, allowed: np.ndarray) -> tuple[Map, ...]:
    """Error over budget in the worst places, the worst first.

    Of axes before the last three the largest error counts.
    """
    if not want.size:
        return ()
    shape = (1,) * (3 - want.ndim) + want.shape
    with np.errstate(invalid="ignore"):
        fraction = over(np.abs(got - want), np.broadcast_to(allowed, want.shape))
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    fraction = np.where(same, 0.0, np.where(np.isnan(fraction), np.inf, fraction))
    fraction = fraction.reshape(-1, *shape[-3:]).max(axis=0)
    worst = np.argsort(-fraction.max(axis=(1, 2)), kind="stable")[:MAPS]
    return tuple(Map(int(place), _coarse(fraction[place])) for place in worst)


def _coarse(fraction: np.ndarray) -> Cells:
    """The cells of (rows, columns)."""
    for axis, most in enumerate((ROWS, COLUMNS)):
        size = fraction.shape[axis]
        starts = np.linspace(0, size, min(size, most), endpoint=False).astype(int)
        fraction = np.maximum.reduceat(fraction, starts, axis)
    return tuple(map(tuple, fraction.tolist()))
