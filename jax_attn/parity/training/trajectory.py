"""What a training run leaves behind, in either framework: NumPy arrays by the port's paths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Arrays = Mapping[str, np.ndarray]

UPDATES = 3
"""Updates from identical gradients: of one alone neither momentum nor a schedule would show."""

LOW = ("bfloat16", "float16")
"""Parameters of these are rounded copies of float32 master weights, which alone are updated."""


def of_masters(dtype: str) -> str:
    """The dtype that an optimizer works in."""
    return "float32" if dtype in LOW else dtype


@dataclass(frozen=True)
class Trajectory:
    """A free run. losses: one for each batch. gradients: of the first batch. moved: how far each
    parameter is from its start, by the number of updates. sizes: of torch's, the RMS of every
    gradient, batch by batch."""

    losses: np.ndarray
    gradients: Arrays
    moved: Mapping[int, Arrays]
    sizes: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Updated:
    """After updates from given gradients. moved: as in a `Trajectory`. state: after the last, by
    torch's name of the moment."""

    moved: Mapping[int, Arrays]
    state: Mapping[str, Arrays]


def checkpoints(steps: int) -> tuple[int, ...]:
    """The numbers of updates after which parameters are compared: a few, the last among them."""
    return tuple(sorted({-(-steps // 4), -(-steps // 2), steps}))


def difference(now: Arrays, start: Arrays) -> dict[str, np.ndarray]:
    """now - start in float64, where it is exact."""
    return {k: now[k].astype(np.float64) - a.astype(np.float64) for k, a in start.items()}
