"""Train a torch module, under a recipe, by the runs of `torch_run`."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from jax_attn.parity.judge.compare import rms
from jax_attn.parity.run.float64_mode import TORCH_DTYPES
from jax_attn.parity.run.reference import one_thread
from jax_attn.parity.training.recipe import Recipe
from jax_attn.parity.training.runs import Arrays, Batch, FreeRun, Replay, checkpoints, difference
from jax_attn.parity.training.torch_run import Rounding, TorchLoss, TorchRun, tensor
from jax_attn.transfer import as_numpy


@dataclass(frozen=True)
class TorchLoop:
    """A torch module and what it is trained on; copies are trained.

    loss: (module, batch of tensors) -> scalar. to_paths: arrays by torch key -> by Flax path.
    """

    module: torch.nn.Module
    loss: TorchLoss
    batches: Sequence[Batch]
    recipe: Recipe
    dtype: str
    to_paths: Callable[[Arrays], dict[str, np.ndarray]]

    def problems(self) -> list[str]:
        """Why a run would not be the same each time, or not that of the port, at once."""
        frozen = [
            f"reference parameter {name!r}: expected it to be trained, as the port's is, got "
            "requires_grad=False; leave it out of the optimizer instead"
            for name, p in self.module.named_parameters()
            if not p.requires_grad
        ]
        if frozen:
            return frozen
        problems = []
        module, before = copy.deepcopy(self.module), dict(self.module.named_buffers())
        batch = {k: tensor(a, TORCH_DTYPES[self.dtype]) for k, a in self.batches[0].items()}
        with one_thread():
            first, second = self.loss(module, batch), self.loss(module, batch)
            gradients = torch.autograd.grad(first, list(module.parameters()), allow_unused=True)
        if first.item() != second.item():
            problems.append(
                "reference: expected the same loss each time, got others on the same batch; does "
                "it drop at random? hand keep masks in with the batches"
            )
        problems += [
            f"reference buffer {name!r}: expected it to stay as it is, got one that training moves"
            for name, buffer in module.named_buffers()
            if not torch.equal(buffer, before[name])
        ]
        problems += [
            f"reference parameter {name!r}: expected a gradient, got none: the loss does not "
            "depend on it"
            for (name, _), gradient in zip(module.named_parameters(), gradients, strict=True)
            if gradient is None
        ]
        return problems

    def free_run(self, steps: int, seed: int | None = None) -> FreeRun:
        """seed: None for torch as it is, 0 for the float64 centre, else a perturbed run's."""
        return self._free_run(steps, self._run(seed), [])

    def gradients(self, updates: int) -> list[dict[str, np.ndarray]]:
        """By torch key, of the batches that the first updates take, along torch's own run."""
        gradients: list[dict[str, np.ndarray]] = []
        self._free_run(updates, self._run(None), gradients)
        return gradients

    def replay(self, gradients: Sequence[Arrays], seed: int | None = None) -> Replay:
        """Updates from `gradients`, by torch key. seed: as for `free_run`."""
        run, k = self._run(seed), self.recipe.accumulate
        start, moved = self.to_paths(run.weights()), {}
        with one_thread():
            for update in range(len(gradients) // k):
                run.update([run.tensors(g) for g in gradients[update * k : (update + 1) * k]])
                moved[update + 1] = difference(self.to_paths(run.weights()), start)
        shapes = {key: a.shape for key, a in run.weights().items()}
        moments = {name: self._by_path(kept, shapes) for name, kept in run.moments().items()}
        return Replay(moved, moments)

    def _run(self, seed: int | None) -> TorchRun:
        rounding = None if seed is None else Rounding.drawn(self.dtype, seed)
        return TorchRun(self.module, self.recipe, self.dtype, rounding)

    def _free_run(
        self, steps: int, run: TorchRun, gradients: list[dict[str, np.ndarray]]
    ) -> FreeRun:
        """Appends every batch's gradients, by torch key, to `gradients`."""
        start = self.to_paths(run.weights())
        losses: list[float] = []
        first: dict[str, np.ndarray] = {}
        sizes: dict[str, list[float]] = {}
        moved, k = {}, self.recipe.accumulate
        with one_thread():
            for update in range(1, steps + 1):
                per_batch = []
                for i in range((update - 1) * k, update * k):
                    loss, by_key = run.gradients(self.loss, self.batches[i % len(self.batches)])
                    losses.append(loss)
                    per_batch.append(by_key)
                    gradients.append({key: as_numpy(g) for key, g in by_key.items()})
                    by_path = self.to_paths(gradients[-1])
                    first = first or by_path
                    for path, a in by_path.items():
                        sizes.setdefault(path, []).append(rms(a.astype(np.float64)))
                run.update(per_batch)
                if update in checkpoints(steps):
                    moved[update] = difference(self.to_paths(run.weights()), start)
        return FreeRun(np.array(losses), first, moved, sizes)

    def _by_path(self, kept: Arrays, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        """Of the paths that any of it goes to: an optimizer may leave parameters out."""
        held = {key: np.full(shape, float(key in kept)) for key, shape in shapes.items()}
        reached, whole = self.to_paths(held), self.to_paths(held | dict(kept))
        return {path: a for path, a in whole.items() if reached[path].any()}
