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
    rows = np.array_split(np.arange(shape[-2]), min(shape[-2], ROWS))

    def cells(place: int, some: np.ndarray) -> tuple[float, ...]:
        at = (slice(None), place, slice(some[0], some[-1] + 1))
        with np.errstate(invalid="ignore"):
            part = over(np.abs(got[at] - want[at]), allowed[at])
        same = (got[at] == want[at]) | (np.isnan(got[at]) & np.isnan(want[at]))
        part = np.where(same, 0.0, np.where(np.isnan(part), np.inf, part)).max(axis=(0, 1))
        columns = np.array_split(part, min(len(part), COLUMNS))
        return tuple(float(f"{column.max():.3g}") for column in columns)

    return tuple(
        tuple(cells(place, some) for some in rows) for place in range(min(shape[-3], MAPS))
    )
