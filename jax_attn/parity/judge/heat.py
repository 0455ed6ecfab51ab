"""Where in a tensor the error sits: maps of its last two axes, coarse enough to be seen at once."""

from typing import TypeAlias

import numpy as np

from jax_attn.parity.judge.figures import over

MAPS, ROWS, COLUMNS = 6, 16, 32
"""The most of each: of heads, or of whatever the axis before the last two holds."""

Maps: TypeAlias = tuple[tuple[tuple[float, ...], ...], ...]
"""Of each place of the axis before the last two: rows of cells, each the largest error over its
budget that any element there has."""


def maps(want: np.ndarray, got: np.ndarray, allowed: np.ndarray) -> Maps:
    """Error over budget; axes before the last three are taken together."""
    if not want.size:
        return ()
    shape = (1,) * (3 - want.ndim) + want.shape
    want, got, allowed = (
        np.broadcast_to(a, want.shape).reshape(-1, *shape[-3:]) for a in (want, got, allowed)
    )
    return tuple(
        _coarse(want[:, place], got[:, place], allowed[:, place])
        for place in range(min(shape[-3], MAPS))
    )


def _coarse(
    want: np.ndarray, got: np.ndarray, allowed: np.ndarray
) -> tuple[tuple[float, ...], ...]:
    """The cells of (…, rows, columns), the largest error over its budget in each."""
    with np.errstate(invalid="ignore"):
        fraction = over(np.abs(got - want), allowed)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    fraction = np.where(same, 0.0, np.where(np.isnan(fraction), np.inf, fraction)).max(axis=0)
    for axis, most in enumerate((ROWS, COLUMNS)):
        size = fraction.shape[axis]
        starts = np.linspace(0, size, min(size, most), endpoint=False).astype(int)
        fraction = np.maximum.reduceat(fraction, starts, axis)
    return tuple(map(tuple, fraction.tolist()))
