"""The results of a training run, in either framework: NumPy arrays by the port's paths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

Arrays = Mapping[str, np.ndarray]
Batch = Mapping[str, np.ndarray]

UPDATES = 3
"""Updates from identical gradients; a single one shows neither momentum nor a schedule."""

LOW = ("bfloat16", "float16")
"""Parameters of these dtypes are rounded copies of float32 masters; only these are updated."""

MOMENT_FIELDS = {
    "acc_delta": ("e_x",),
    "exp_avg": ("mu",),
    "exp_avg_sq": ("nu",),
    "exp_inf": ("nu",),
    "grad_avg": ("mu",),
    "momentum_buffer": ("trace",),
    "square_avg": ("nu", "e_g"),
    "sum": ("sum_of_squares",),
}
"""A moment of a torch optimizer -> the fields of optax's states that may hold it."""


def master_dtype(dtype: str) -> str:
    """Return the dtype that an optimizer works in."""
    return "float32" if dtype in LOW else dtype


def checkpoints(steps: int) -> tuple[int, ...]:
    """Return the numbers of updates after which parameters are compared; the last is `steps`."""
    return tuple(sorted({-(-steps // 4), -(-steps // 2), steps}))


def difference(now: Arrays, start: Arrays) -> dict[str, np.ndarray]:
    """Return now - start in float64, in which it is exact."""
    return {k: now[k].astype(np.float64) - a.astype(np.float64) for k, a in start.items()}


class Label(NamedTuple):
    """The label of a reported tensor. moved: the path of the parameter whose movement it is."""

    name: str
    transform: str
    kind: str = "output"
    moved: str | None = None


@dataclass(frozen=True)
class FreeRun:
    """A run that computes its own gradients, from the first batch on.

    losses: one for each batch. gradients: those of the first batch. moved: number of updates ->
    distance of each parameter from its start. gradient_sizes: the RMS of every gradient, batch by
    batch; only torch's runs have it.
    """

    losses: np.ndarray
    gradients: Arrays
    moved: Mapping[int, Arrays]
    gradient_sizes: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def tensors(self) -> dict[Label, np.ndarray]:
        """Return all that is compared: gradients, and losses and parameters by checkpoint."""
        tensors = {
            Label(path, "first batch", "gradient of parameter"): gradient
            for path, gradient in self.gradients.items()
        }
        start, batches_per_update = 0, len(self.losses) // max(self.moved)
        for update, moved in self.moved.items():
            end = update * batches_per_update
            tensors[Label("loss", f"losses {start + 1}-{end}")] = self.losses[start:end]
            start = end
            for path, distance in moved.items():
                tensors[Label(f"moved {path}", f"step {update}", moved=path)] = distance
        return tensors


@dataclass(frozen=True)
class Replay:
    """Updates from given gradients.

    moved: as in a `FreeRun`. moments: those in the optimizer's state after the last update, by
    torch's name and path.
    """

    moved: Mapping[int, Arrays]
    moments: Mapping[str, Arrays]

    def tensors(self) -> dict[Label, np.ndarray]:
        """Return all that is compared: parameters after the first and last update, and moments.

        Moments that optax has no field for are left out.
        """
        last = max(self.moved)
        moved = {
            Label(f"update of {path}", f"update {update}", moved=path): distance
            for update in sorted({1, last})
            for path, distance in self.moved[update].items()
        }
        return moved | {
            Label(f"{name} of {path}", f"update {last}"): moment
            for name, by_path in self.moments.items()
            if name in MOMENT_FIELDS
            for path, moment in by_path.items()
        }
