"""Train a torch module in its own dtype, in float64, or in float64 with perturbed operations."""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from jax_attn.parity.judge.budget import PRECISIONS
from jax_attn.parity.judge.compare import rms
from jax_attn.parity.run.modes.draws import Draws
from jax_attn.parity.run.modes.float64_mode import TORCH_DTYPES, Unperturbed
from jax_attn.parity.run.modes.perturbed_mode import Perturbed
from jax_attn.parity.run.modes.rounding import DrawnRounding
from jax_attn.parity.run.torch_settings import one_thread, plain_kernels
from jax_attn.training.optimizers.optax_like import KINDS
from jax_attn.training.paths import Paths
from jax_attn.training.recipe import Recipe
from jax_attn.training.runs import (
    LOW,
    Arrays,
    Batch,
    FreeRun,
    Replay,
    checkpoints,
    difference,
    master_dtype,
)
from jax_attn.transfer import as_numpy

TorchLoss = Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], torch.Tensor]

ELEMENTWISE = tuple(getattr(torch.optim, name) for name in KINDS)
"""Elementwise optimizers: several parameters may be concatenated into one."""


_OF_ALL = ("step", "mu_product")
"""What a state keeps once for all elements of a parameter."""


class KeepsSigns(DrawnRounding):
    """Rounding that changes no sign and no zero: a moment below 0 would have no square root."""

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as the precision stores it; 0 if that would change its sign."""
        stored = super().stored(x)
        return torch.where(x * stored > 0, stored, 0.0)


@dataclass(frozen=True)
class Rounding:
    """The perturbations of a float64 run: in the forward and backward pass, and in the update."""

    forward: Unperturbed
    update: Unperturbed

    @classmethod
    def drawn(cls, dtype: str, seed: int) -> "Rounding":
        """Draw the perturbations of a seed; seed 0 is the exact centre, without any."""
        if not seed:
            return cls(Unperturbed(), Unperturbed())
        low, own = PRECISIONS[dtype], PRECISIONS[master_dtype(dtype)]
        update = Perturbed(own)
        update.rounding = KeepsSigns(own, Draws(2 * seed + 1))
        return cls(Perturbed(low, 2 * seed), update)

    def lowered(self, master: torch.Tensor) -> torch.Tensor:
        """Return a master weight as the module's dtype stores it; in float64 no cast does that."""
        return (
            self.forward.rounding.stored(master) if isinstance(self.forward, Perturbed) else master
        )


class TorchRun:
    """A copy of a module with its master weights, optimizer and scheduler.

    rounding: None for torch's own run in `dtype`; otherwise the run is in float64.
    """

    def __init__(
        self, module: torch.nn.Module, recipe: Recipe, dtype: str, rounding: Rounding | None
    ):
        self.recipe, self._rounding = recipe, rounding
        as_it_is, low = rounding is None, dtype in LOW
        self.module = copy.deepcopy(module) if as_it_is else copy.deepcopy(module).double()
        masters = copy.deepcopy(self.module) if low else self.module
        masters = masters.float() if low and as_it_is else masters
        self._copies = dict(self.module.named_parameters()) if low else {}
        self._masters = dict(masters.named_parameters())
        self._optimizer = recipe.optimizer(masters)
        self._flattened: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        if not as_it_is:  # a dispatch mode sees only single operations
            for group in self._optimizer.param_groups:
                group |= {name: False for name in ("foreach", "fused") if name in group}
                if isinstance(group["lr"], torch.Tensor):  # a mode would perturb it
                    group["lr"] = group["lr"].item()
            if type(self._optimizer) in ELEMENTWISE:
                alike = [g for g in self._optimizer.param_groups if _are_alike(self._optimizer, g)]
                self._flattened = [_flattened(self._optimizer, group) for group in alike]
        self._scheduler = recipe.schedule(self._optimizer) if recipe.schedule else None
        self._batch_dtype = TORCH_DTYPES[dtype] if as_it_is else torch.float64

    def gradients(self, loss: TorchLoss, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
        """Return (the loss, torch key -> gradient) of one batch."""
        tensors = {name: tensor(a, self._batch_dtype) for name, a in batch.items()}
        parameters = dict(self.module.named_parameters())
        with contextlib.ExitStack() as modes:
            if self._rounding:
                modes.enter_context(plain_kernels())
                modes.enter_context(self._rounding.forward)
            value = loss(self.module, tensors)
            gradients = torch.autograd.grad(value, list(parameters.values()))
        return value.item(), dict(zip(parameters, gradients, strict=True))

    def update(self, per_batch: list[dict[str, torch.Tensor]]) -> None:
        """Make one update from the gradients of all batches that it accumulates."""
        recipe, masters = self.recipe, list(self._masters.values())
        one_by_one = False if self._rounding else None
        with torch.no_grad(), self._rounding.update if self._rounding else contextlib.nullcontext():
            for name, p in self._masters.items():
                p.grad = per_batch[0][name].to(p.dtype, copy=True)
                for gradients in per_batch[1:]:
                    p.grad.add_(gradients[name].to(p.dtype))
                if recipe.accumulated == "mean" and recipe.accumulate > 1:
                    p.grad.div_(float(recipe.accumulate))
            if recipe.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(masters, recipe.clip_norm, foreach=one_by_one)
            if recipe.clip_value is not None:
                torch.nn.utils.clip_grad_value_(masters, recipe.clip_value, foreach=one_by_one)
            for whole, parts in self._flattened:
                whole.grad = torch.cat([p.grad.flatten() for p in parts if p.grad is not None])
            self._optimizer.step()
            if self._scheduler is not None:
                self._scheduler.step()
        with torch.no_grad():
            for name, p in self._copies.items():
                master = self._masters[name]
                p.copy_(self._rounding.lowered(master) if self._rounding else master)

    def tensors(self, gradients: Arrays) -> dict[str, torch.Tensor]:
        """Return gradients by torch key, in the dtype in which the update uses them."""
        return {name: tensor(gradients[name], p.dtype) for name, p in self._masters.items()}

    def weights(self) -> dict[str, np.ndarray]:
        """Return torch key -> master weight."""
        return {name: as_numpy(p.detach()).copy() for name, p in self._masters.items()}

    def moments(self) -> dict[str, dict[str, np.ndarray]]:
        """Return moment -> torch key -> the optimizer's elementwise state of the parameter."""
        key = {id(p): name for name, p in self._masters.items()}
        within = {id(p) for _, parts in self._flattened for p in parts}
        wholes = list(self._flattened)
        wholes += [(p, [p]) for p in self._masters.values() if id(p) not in within]
        moments: dict[str, dict[str, np.ndarray]] = {}
        for whole, parts in wholes:
            for name, kept in self._optimizer.state.get(whole, {}).items():
                elementwise = isinstance(kept, torch.Tensor) and kept.shape == whole.shape
                if not elementwise or name in _OF_ALL:
                    continue
                pieces = kept.flatten().split([p.numel() for p in parts])
                for p, piece in zip(parts, pieces, strict=True):
                    array = as_numpy(piece.view(p.shape)).copy()
                    moments.setdefault(name, {})[key[id(p)]] = array
        return moments


def _are_alike(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Return whether the parameters of a group have made equally many updates."""
    states = [optimizer.state.get(p, {}) for p in group["params"]]
    counts = {float(state.get("step", 0.0)) for state in states}
    return len({tuple(state) for state in states}) == len(counts) == 1


def _flattened(
    optimizer: torch.optim.Optimizer, group: dict[str, Any]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return (one parameter that replaces the group's in updates, these as views of it)."""
    parts = group["params"]
    whole = torch.nn.Parameter(torch.cat([p.detach().flatten() for p in parts]))
    pieces = whole.detach().split([p.numel() for p in parts])
    states = [optimizer.state.pop(p, {}) for p in parts]
    for p, piece in zip(parts, pieces, strict=True):
        p.data = piece.view(p.shape)
    if states[0]:  # of a run that goes on; Adagrad has one before its first update, too
        optimizer.state[whole] = {
            name: torch.cat([state[name].flatten() for state in states])
            if isinstance(kept, torch.Tensor) and name not in _OF_ALL
            else kept
            for name, kept in states[0].items()
        }
    group["params"] = [whole]
    return whole, parts


def tensor(a: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Return floating arrays in `dtype`, integers as int64, booleans unchanged."""
    if a.dtype.kind in "biu":
        return torch.from_numpy(a.astype(np.int64) if a.dtype.kind in "iu" else a.copy())
    return torch.from_numpy(a.astype(np.float64)).to(dtype)


@dataclass(frozen=True)
class TorchLoop:
    """A torch module and its training data; copies are trained.

    loss: (module, batch of tensors) -> scalar. to_paths: arrays by torch key -> by the port's path.
    """

    module: torch.nn.Module
    loss: TorchLoss
    batches: Sequence[Batch]
    recipe: Recipe
    dtype: str
    to_paths: Paths

    def problems(self) -> list[str]:
        """List why runs would differ from one another, or from the port's."""
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
                "reference: expected the same loss each time, got different losses on the same "
                "batch; if it draws dropout, pass keep masks in the batches"
            )
        problems += [
            f"reference buffer {name!r}: expected a constant buffer, got one that training changes"
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
        """Run freely. seed: None for torch's own run, 0 for the float64 centre, else perturbed."""
        return self._free_run(steps, self._run(seed), [])

    def gradients(self, updates: int) -> list[dict[str, np.ndarray]]:
        """Return the gradients, by torch key, of the first updates' batches in torch's own run."""
        gradients: list[dict[str, np.ndarray]] = []
        self._free_run(updates, self._run(None), gradients)
        return gradients

    def replay(self, gradients: Sequence[Arrays], seed: int | None = None) -> Replay:
        """Run updates from `gradients`, by torch key. seed: as for `free_run`."""
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
        """Run freely, and append every batch's gradients, by torch key, to `gradients`."""
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
        """Return `kept` for the Flax paths that it reaches: an optimizer may omit parameters."""
        held = {key: np.full(shape, float(key in kept)) for key, shape in shapes.items()}
        reached, whole = self.to_paths(held), self.to_paths(held | dict(kept))
        return {path: a for path, a in whole.items() if reached[path].any()}
