"""The reference's side of a training check: torch as it is, in float64, and perturbed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import optax
import torch
from flax import nnx

from jax_attn.parity.judge.budget import PRECISIONS, RUNS, Budget
from jax_attn.parity.training.losses import rounded
from jax_attn.parity.training.recipe import Recipe
from jax_attn.parity.training.runs import UPDATES, Batch, FreeRun, Replay
from jax_attn.parity.training.torch_loop import TorchLoop
from jax_attn.parity.training.torch_run import TorchLoss
from jax_attn.transfer import Layout, flatten

Kind = TypeVar("Kind", FreeRun, Replay)


@dataclass(frozen=True)
class Runs(Generic[Kind]):
    """One training, run by torch as it is, exactly in float64, and perturbed by roundoff."""

    own: Kind
    exact: Kind
    perturbed: list[Kind]

    @classmethod
    def of(cls, run: Callable[[int | None], Kind], perturbed: int) -> "Runs[Kind]":
        """run: of a seed as `TorchLoop.free_run` takes it."""
        in_float64 = [run(seed) for seed in range(perturbed + 1)]
        return cls(run(None), in_float64[0], in_float64[1:])


@dataclass(frozen=True)
class ReferenceTraining:
    """Everything of a training check that does not depend on the port.

    perturbed_runs: how many.
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
        """port: for the shapes of its parameters alone."""
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
        """What equals the reference's optimizer, on this port."""
        # The updates from identical gradients may be more than those of a short free run.
        updates = max(self.steps, self.updates)
        recipe = self.loop.recipe
        return recipe.optax_like(self.loop.module, updates, port=port, layout=self.layout)

    @cached_property
    def updates(self) -> int:
        """How many are made from identical gradients; a schedule may have fewer rates."""
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
        """Paths whose gradient is zero in theory (a key's bias), in every batch: where they go is
        rounding alone, of which Adam makes steps as large as any."""
        exact = self.free_runs.exact.gradient_sizes
        perturbed = [run.gradient_sizes for run in self.free_runs.perturbed]
        precision = PRECISIONS[self.loop.dtype]
        zeros = {
            path: Budget.of(np.array(sizes), [np.array(run[path]) for run in perturbed], precision)
            for path, sizes in exact.items()
        }
        return frozenset(path for path, budget in zeros.items() if max(exact[path]) <= budget.zero)
