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
from jax_attn.training.paths import Paths
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
from jax_attn.transfer import Layout

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

    perturbed_runs: the number of these. replayed: that of updates from identical gradients.
    """

    loop: TorchLoop
    steps: int
    perturbed_runs: int = RUNS
    replayed: int = UPDATES

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
        paths = Paths.of(reference, layout, port)
        rows = [rounded(batch, dtype) for batch in batches]
        return cls(TorchLoop(reference, loss, rows, recipe, dtype, paths), steps)

    def optax_like(self, port: nnx.Module) -> optax.GradientTransformation:
        """Return the optax equivalent of the reference's optimizer, for this port."""
        # The updates from identical gradients may be more than those of a short free run.
        updates = max(self.steps, self.updates)
        loop = self.loop
        tx = loop.recipe.optax_like(loop.module, updates, port=port, paths=loop.to_paths)
        # torch clips by a norm in which buffers have no part.
        return optax.chain(_without(self.constants), tx) if self.constants else tx

    @property
    def constants(self) -> frozenset[str]:
        """Paths of the port's parameters that are buffers of the reference."""
        return self.loop.to_paths.constants

    @cached_property
    def updates(self) -> int:
        """The number of updates from identical gradients; a schedule may have rates for fewer."""
        every = self.loop.recipe.has_rates(self.loop.module, self.replayed)
        return self.replayed if every else min(self.replayed, self.steps)

    def replaying(self, updates: int) -> "ReferenceTraining":
        """Return the same training with another number of updates from identical gradients."""
        other = replace(self, replayed=updates)
        vars(other).update(free_runs=self.free_runs, idle=self.idle)
        return other

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
        idle = (path for path, budget in zeros.items() if max(exact[path]) <= budget.zero)
        return frozenset(idle) - self.constants


def _without(paths: frozenset[str]) -> optax.GradientTransformation:
    """Set the gradients of some paths to zero."""
    return optax.stateless(
        lambda gradients, _: {k: 0 * g if k in paths else g for k, g in gradients.items()}
    )


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
    return compared(reference, reference.replays, port, precision)


def compare_free_run(reference: ReferenceTraining, port: FreeRun) -> Iterator[TensorReport]:
    """Compare the first gradients, the losses, and the distances moved at each checkpoint."""
    precision = PRECISIONS[reference.loop.dtype]
    return compared(reference, reference.free_runs, port, precision)


def compared(
    reference: ReferenceTraining, runs: Runs[Kind], port: Kind, precision: Precision
) -> Iterator[TensorReport]:
    """Yield a report on each tensor of a port's run. runs: those of the reference to compare with.

    For parameters that only rounding moves, only the spread limits the drift. A buffer of the
    reference has no gradient to compare.
    """
    ours, own = port.tensors(), runs.own.tensors()
    perturbed = [run.tensors() for run in runs.perturbed]
    for label, exact in runs.exact.tensors().items():
        if label.moved is None and label not in ours:
            continue  # a moment that the port's optimizer does not keep
        if label.name in reference.constants and label.kind.startswith("gradient"):
            continue
        want, got, torchs = map(_wide, (exact, ours[label], own[label]))
        budget = Budget.of(want, [_wide(run[label]) for run in perturbed], precision)
        if label.moved in reference.idle:
            budget = replace(budget, zero=math.inf)
        names = {"kind": label.kind, "name": label.name, "transform": label.transform}
        yield judge(want, got, torchs, budget, **names)


def _wide(a: np.ndarray) -> np.ndarray:
    return np.asarray(a).astype(np.float64)
