"""Coarse maps of a tensor's last two axes, which show at a glance where its error is."""

from typing import NamedTuple, TypeAlias

import numpy as np

from jax_attn.parity.judge.figures import over

MAPS, ROWS, COLUMNS = 6, 16, 32
"""Limits: the number of maps (heads, or other places of the axis -3), their rows and columns."""

Cells: TypeAlias = tuple[tuple[float, ...], ...]
"""Rows of cells; each holds the largest error over budget of its elements."""


class ErrorMap(NamedTuple):
    """A map of one place. place: the index on axis -3."""

    place: int
    cells: Cells


def maps(want: np.ndarray, got: np.ndarray, allowed: np.ndarray) -> tuple[ErrorMap, ...]:
    """Return maps of error over budget at the worst places of axis -3, the worst first.

    Earlier axes are reduced to their largest error.
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
    return tuple(ErrorMap(int(place), _coarse(fraction[place])) for place in worst)


def _coarse(fraction: np.ndarray) -> Cells:
    """Reduce an array (rows, columns) to at most ROWS by COLUMNS cells, by the maximum."""
    for axis, most in enumerate((ROWS, COLUMNS)):
        size = fraction.shape[axis]
        starts = np.linspace(0, size, min(size, most), endpoint=False).astype(int)
        fraction = np.maximum.reduceat(fraction, starts, axis)
    return tuple(map(tuple, fraction.tolist()))
