"""Statistics of one tensor's errors against the oracle: sums, the worst, and where they are."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from jax_attn.parity.judge.parts import dot, parts

MAPS, ROWS, COLUMNS = 6, 16, 32
"""Limits: the number of maps (heads, or other places of the axis -3), their rows and columns."""

Cells: TypeAlias = tuple[tuple[float, ...], ...]
"""Rows of cells; each holds the largest error over budget of its elements."""


@dataclass
class Undefined:
    """Elements that are NaN or infinite where the oracle is finite, or the reverse."""

    count: int = 0
    first: int = 0

    def look(self, start: int, got: np.ndarray, want: np.ndarray, finite: np.ndarray) -> bool:
        """Count those in a flat part that begins at `start`; return whether both are finite."""
        if (got_finite := np.isfinite(got)).all() and finite.all():
            return True
        differ = (~got_finite & finite) | (
            ~finite & ~((np.isnan(got) & np.isnan(want)) | (got == want))
        )
        if differ.any():
            self.first = self.first if self.count else start + int(np.argmax(differ))
            self.count += int(differ.sum())
        return False


@dataclass
class SideErrors:
    """The errors of one side, over the elements where the oracle is finite.

    squares: the sum of their squares. shared: the sum of each error times the oracle's element.
    fraction: the largest error over its budget, at the flat index `worst`.
    """

    undefined: Undefined = field(default_factory=Undefined)
    squares: float = 0.0
    shared: float = 0.0
    fraction: float = -1.0
    worst: int = 0
    all_finite: bool = True

    def rms(self, count: int) -> float:
        return math.sqrt(self.squares / count)


@dataclass
class Figures:
    """The statistics of a tensor on both sides.

    count: the number of elements where the oracle is finite. norm: the sum of the oracle's squares
    there. has_budget: whether all of these elements have a budget.
    """

    port: SideErrors
    own: SideErrors | None
    count: int = 0
    norm: float = 0.0
    has_budget: bool = True


def figures(
    want: np.ndarray, got: np.ndarray, own: np.ndarray | None, allowed: np.ndarray
) -> Figures:
    """Compute the statistics of a tensor, in one pass over float64 arrays of one shape.

    own: the reference's tensor. allowed: the error that each element may have.
    """
    result = Figures(SideErrors(), None if own is None else SideErrors())
    sides = [(result.port, got.reshape(-1))]
    if own is not None and result.own is not None:
        sides.append((result.own, own.reshape(-1)))
    want, allowed = want.reshape(-1), allowed.reshape(-1)
    for part in parts(want.size):
        w, most = want[part], allowed[part]
        finite = np.isfinite(w)
        places = None if finite.all() else np.flatnonzero(finite)
        core = w if places is None else w[places]
        most = most if places is None else most[places]
        result.count += core.size
        result.norm += dot(core, core)
        result.has_budget = result.has_budget and bool(np.isfinite(most).all())
        for errors, side in sides:
            is_finite = errors.undefined.look(part.start, side[part], w, finite)
            if core.size:
                x = side[part] if places is None else side[part][places]
                _add(errors, x, core, most, is_finite, part.start, places)
    return result


def _add(
    errors: SideErrors,
    x: np.ndarray,
    want: np.ndarray,
    allowed: np.ndarray,
    is_finite: bool,
    start: int,
    places: np.ndarray | None,
) -> None:
    """Add a part to the sums. places: its indices where the oracle is finite; None for all."""
    with np.errstate(invalid="ignore", over="ignore"):
        signed = x - want
        errors.shared += dot(signed, want)
        size = np.abs(signed, out=signed)
        errors.squares += dot(size, size)
        if not is_finite:
            errors.all_finite = errors.all_finite and bool(np.isfinite(x).all())
            size = np.nan_to_num(size, nan=math.inf, posinf=math.inf)
        fractions = over(size, allowed)
    worst = int(np.argmax(fractions))
    if fractions[worst] > errors.fraction:
        errors.fraction = float(fractions[worst])
        errors.worst = start + (worst if places is None else int(places[worst]))


def over(error: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Return error / allowed, and 0 where the error is 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        fraction = error / allowed
        if allowed.size and allowed.min() > 0:
            return fraction
        return np.where(error == 0, 0.0, fraction)  # takes three times as long


# --- where they are -----------------------------------------------------------------------------


class ErrorMap(NamedTuple):
    """A map of one place. place: the index on axis -3."""

    place: int
    cells: Cells


def maps(want: np.ndarray, got: np.ndarray, allowed: np.ndarray) -> tuple[ErrorMap, ...]:
    """Return coarse maps of error over budget over a tensor's last two axes, the worst first.

    There is one for each of the worst places of axis -3; earlier axes are reduced to their largest
    error.
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
