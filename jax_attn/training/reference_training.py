"""The reference's side of a training check: torch's own runs, in float64, and perturbed.

The port's runs are compared with these: one report per tensor, judged within its budget.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import optax
import torch
from flax import nnx

from jax_attn.parity.judge.budget import PRECISIONS, RUNS, Budget, Precision
from jax_attn.parity.judge.compare import TensorReport, judge
from jax_attn.parity.judge.finding import Finding, findings
from jax_attn.training.recipe import Recipe, rounded
from jax_attn.training.runs import (
    MOMENT_FIELDS,
    UPDATES,
    Batch,
    FreeRun,
    Replay,
    master_dtype,
)
from jax_attn.training.torch_loop import TorchLoop, TorchLoss
from jax_attn.transfer import Layout, flatten

Kind = TypeVar("Kind", FreeRun, Replay)


@dataclass(frozen=True)
class Runs(Generic[Kind]):
    """The runs of one training: torch's own, exact in float64, and perturbed at roundoff."""

    own: Kind
    exact: Kind
    perturbed: list[Kind]

    @classmethod
    def of(cls, run: Callable[[int | None], Kind], perturbed: int) -> "Runs[Kind]":
        """Make all runs. run: called with a seed as `TorchLoop.free_run` takes it."""
        in_float64 = [run(seed) for seed in range(perturbed + 1)]
        return cls(run(None), in_float64[0], in_float64[1:])


@dataclass(frozen=True)
class ReferenceTraining:
    """The part of a training check that does not depend on the port.

    perturbed_runs: the number of these.
    """

    loop: TorchLoop
    steps: int
    layout: Layout
    perturbed_runs: int = RUNS

    @classmethod
    def of(
        cls,
        reference: torch.nn.Module,
        batches: Sequence[Batch],
        recipe: Recipe,
        steps: int,
        loss: TorchLoss,
        dtype: str,
        *,
        layout: Layout,
        port: nnx.Module,
    ) -> "ReferenceTraining":
        """Build the reference's side. port: only the shapes of its parameters are read."""
        shapes = {path: a.shape for path, a in flatten(port).items()}
        loop = TorchLoop(
            reference,
            loss,
            [rounded(batch, dtype) for batch in batches],
            recipe,
            dtype,
            lambda tensors: layout.to_flax(tensors, shapes),
        )
        return cls(loop, steps, layout)

    def optax_like(self, port: nnx.Module) -> optax.GradientTransformation:
        """Return the optax equivalent of the reference's optimizer, for this port."""
        # The updates from identical gradients may be more than those of a short free run.
        updates = max(self.steps, self.updates)
        recipe = self.loop.recipe
        return recipe.optax_like(self.loop.module, updates, port=port, layout=self.layout)

    @cached_property
    def updates(self) -> int:
        """The number of updates from identical gradients; a schedule may have rates for fewer."""
        every = self.loop.recipe.has_rates(self.loop.module, UPDATES)
        return UPDATES if every else min(UPDATES, self.steps)

    @cached_property
    def gradients(self) -> list[dict[str, np.ndarray]]:
        """The identical gradients, by torch key."""
        return self.loop.gradients(self.updates)

    @cached_property
    def replays(self) -> Runs[Replay]:
        """Updates from the identical gradients."""
        return Runs.of(lambda seed: self.loop.replay(self.gradients, seed), self.perturbed_runs)

    @cached_property
    def free_runs(self) -> Runs[FreeRun]:
        return Runs.of(lambda seed: self.loop.free_run(self.steps, seed), self.perturbed_runs)

    @cached_property
    def idle(self) -> frozenset[str]:
        """Paths whose gradient is zero in theory in every batch, such as a key's bias.

        Only rounding moves them, and Adam turns it into steps as large as any.
        """
        exact = self.free_runs.exact.gradient_sizes
        perturbed = [run.gradient_sizes for run in self.free_runs.perturbed]
        precision = PRECISIONS[self.loop.dtype]
        zeros = {
            path: Budget.of(np.array(sizes), [np.array(run[path]) for run in perturbed], precision)
            for path, sizes in exact.items()
        }
        return frozenset(path for path, budget in zeros.items() if max(exact[path]) <= budget.zero)


def missing_moments(reference: ReferenceTraining, port: Replay) -> tuple[Finding, ...]:
    """Report moments that torch keeps and the port's optimizer does not."""
    missing = (
        f"optimizer state: the port's optimizer lacks {name} of {path}, which torch keeps"
        for name, by_path in reference.replays.own.moments.items()
        if name in MOMENT_FIELDS
        for path in by_path
        if path not in port.moments.get(name, {})
    )
    return findings("moment-missing", missing)


def compare_replay(reference: ReferenceTraining, port: Replay) -> Iterator[TensorReport]:
    """Compare updates from identical gradients, and the optimizer's state that the port has.

    For parameters, the distance moved after the first and after the last update is compared.
    """
    precision = PRECISIONS[master_dtype(reference.loop.dtype)]
    return compared(reference.replays, port, precision, reference.idle)


def compare_free_run(reference: ReferenceTraining, port: FreeRun) -> Iterator[TensorReport]:
    """Compare the first gradients, the losses, and the distances moved at each checkpoint."""
    precision = PRECISIONS[reference.loop.dtype]
    return compared(reference.free_runs, port, precision, reference.idle)


def compared(
    runs: Runs[Kind], port: Kind, precision: Precision, idle: frozenset[str]
) -> Iterator[TensorReport]:
    """Yield a report on each tensor of a port's run.

    idle: parameters that only rounding moves; for them, only the spread limits the drift.
    """
    ours, own = port.tensors(), runs.own.tensors()
    perturbed = [run.tensors() for run in runs.perturbed]
    for label, exact in runs.exact.tensors().items():
        if label.moved is None and label not in ours:
            continue  # a moment that the port's optimizer does not keep
        want, got, torchs = map(_wide, (exact, ours[label], own[label]))
        budget = Budget.of(want, [_wide(run[label]) for run in perturbed], precision)
        if label.moved in idle:
            budget = replace(budget, zero=math.inf)
        names = {"kind": label.kind, "name": label.name, "transform": label.transform}
        yield judge(want, got, torchs, budget, **names)


def _wide(a: np.ndarray) -> np.ndarray:
    return np.asarray(a).astype(np.float64)
