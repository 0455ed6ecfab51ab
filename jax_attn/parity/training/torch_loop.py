"""Train a torch module: as it is, in float64, and in float64 with every operation perturbed."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from jax_attn.parity.judge.budget import PRECISIONS
from jax_attn.parity.judge.compare import rms
from jax_attn.parity.run.reference import one_thread, plain_kernels
from jax_attn.parity.run.torch_modes import TORCH_DTYPES, Perturbed
from jax_attn.parity.training.optax_like import KINDS
from jax_attn.parity.training.schedules import learning_rates
from jax_attn.parity.training.trajectory import (
    LOW,
    Arrays,
    Trajectory,
    Updated,
    checkpoints,
    difference,
    of_masters,
)
from jax_attn.transfer import as_numpy

Batch = Mapping[str, np.ndarray]


class PerturbedUpdate(Perturbed):
    """And no rounding changes a sign, and none a zero: of a moment below 0 there is no root."""

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        moved = super()._stored(x)
        return torch.where(x * moved > 0, moved, 0.0)


@dataclass(frozen=True)
class Recipe:
    """How parameters are updated. optimizer: module -> torch optimizer; schedule: that -> torch
    scheduler; the rest as for `optax_like`."""

    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    accumulated: str = "sum"

    def with_options(self, **options: Any) -> "Recipe":
        """The optimizer's own changed, in every param_group."""

        def changed(module: torch.nn.Module) -> torch.optim.Optimizer:
            made = self.optimizer(module)
            for group in made.param_groups:
                group |= options
            return made

        return replace(self, optimizer=changed)


@dataclass(frozen=True)
class _Rounding:
    """What a run is perturbed by; forward and update None: torch as it is."""

    forward: Perturbed | None
    update: Perturbed | None

    @classmethod
    def drawn(cls, dtype: str, seed: int) -> "_Rounding":
        """seed 0: the centre, exact."""
        low, own = PRECISIONS[dtype], PRECISIONS[of_masters(dtype)]
        forward = Perturbed(low if seed else None, 2 * seed)
        return cls(forward, PerturbedUpdate(own if seed else None, 2 * seed + 1))

    def lowered(self, x: torch.Tensor) -> torch.Tensor:
        """Master weights as the module's dtype keeps them, where that is not a cast's doing."""
        moves = self.forward is not None and self.forward.precision is not None
        return self.forward._stored(x) if moves else x


AS_IT_IS = _Rounding(None, None)


@dataclass(frozen=True)
class TorchLoop:
    """A torch module and what it is trained on; copies are trained.

    loss: (module, batch of tensors) -> scalar. to_paths: torch key -> array, to Flax path ->
    array.
    """

    module: torch.nn.Module
    loss: Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], torch.Tensor]
    batches: Sequence[Batch]
    recipe: Recipe
    dtype: str
    to_paths: Callable[[Arrays], dict[str, np.ndarray]]

    def problems(self) -> list[str]:
        """Why a run would not be the same each time, or not that of the port, at once."""
        found = [
            f"reference parameter {name!r}: expected it to be trained, as the port's is, got "
            "requires_grad=False; leave it out of the optimizer instead"
            for name, p in self.module.named_parameters()
            if not p.requires_grad
        ]
        if found:
            return found
        module, before = copy.deepcopy(self.module), dict(self.module.named_buffers())
        batch = {k: _tensor(a, TORCH_DTYPES[self.dtype]) for k, a in self.batches[0].items()}
        with one_thread():
            first, second = self.loss(module, batch), self.loss(module, batch)
            grads = torch.autograd.grad(first, list(module.parameters()), allow_unused=True)
        if first.item() != second.item():
            found.append(
                "reference: expected the same loss each time, got others on the same batch; does "
                "it drop at random? hand keep masks in with the batches"
            )
        found += [
            f"reference buffer {name!r}: expected it to stay as it is, got one that training moves"
            for name, a in module.named_buffers()
            if not torch.equal(a, before[name])
        ]
        found += [
            f"reference parameter {name!r}: expected a gradient, got none: the loss does not "
            "depend on it"
            for (name, _), g in zip(module.named_parameters(), grads, strict=True)
            if g is None
        ]
        return found

    def scheduled(self, updates: int) -> bool:
        """Whether there are rates for so many updates."""
        make, optimizer = self.recipe.schedule, self.recipe.optimizer(copy.deepcopy(self.module))
        return make is None or not learning_rates(make(optimizer), updates)[1]

    def train(self, steps: int, seed: int | None = None) -> Trajectory:
        """A free run. seed: None as it is, 0 the float64 centre, else one perturbed by draws."""
        rounding = AS_IT_IS if seed is None else _Rounding.drawn(self.dtype, seed)
        with one_thread(), _kernels(rounding):
            return self._train(steps, rounding)

    def gradients(self, updates: int) -> list[dict[str, np.ndarray]]:
        """By torch key, of the batches that the first updates take, along torch's own run."""
        found: list[dict[str, np.ndarray]] = []
        with one_thread():
            self._train(updates, AS_IT_IS, found)
        return found

    def replay(self, gradients: Sequence[Arrays], seed: int | None = None) -> Updated:
        """Updates from `gradients`, by torch key. seed: as for `train`."""
        rounding = AS_IT_IS if seed is None else _Rounding.drawn(self.dtype, seed)
        run = _Run(self, rounding)
        start, moved, k = run.weights(), {}, self.recipe.accumulate
        with one_thread():
            for update in range(len(gradients) // k):
                given = [run.tensors(g) for g in gradients[update * k : (update + 1) * k]]
                run.update(given)
                moved[update + 1] = difference(run.weights(), start)
        return Updated(moved, run.state())

    def _train(self, steps, rounding, keep: list | None = None) -> Trajectory:
        run = _Run(self, rounding)
        start, losses, first, moved = run.weights(), [], {}, {}
        sizes: dict[str, list[float]] = {}
        k, marks = self.recipe.accumulate, checkpoints(steps)
        for step in range(steps):
            given = []
            for i in range(step * k, (step + 1) * k):
                loss, grads = run.gradients(self.batches[i % len(self.batches)])
                losses.append(loss)
                given.append(grads)
                if keep is not None:
                    keep.append(run.arrays(grads))
                by_path = self.to_paths(run.arrays(grads))
                first = first or by_path
                for path, a in by_path.items():
                    sizes.setdefault(path, []).append(rms(a.astype(np.float64)))
            run.update(given)
            if step + 1 in marks:
                moved[step + 1] = difference(run.weights(), start)
        return Trajectory(np.array(losses), first, moved, sizes)


class _Run:
    """One run's module, master weights, optimizer and scheduler."""

    def __init__(self, loop: TorchLoop, rounding: _Rounding):
        self.loop, self.rounding, self.recipe = loop, rounding, loop.recipe
        exact = rounding is not AS_IT_IS
        low = loop.dtype in LOW
        self.module = copy.deepcopy(loop.module)
        self.module = self.module.double() if exact else self.module
        self.masters = copy.deepcopy(self.module) if low else self.module
        self.masters = self.masters.float() if low and not exact else self.masters
        self.params = dict(self.module.named_parameters())
        self.owned = dict(self.masters.named_parameters())
        self.optimizer = self.recipe.optimizer(self.masters)
        self.flat: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        if exact:  # operation by operation, which is all that a mode sees
            for group in self.optimizer.param_groups:
                group |= {name: False for name in ("foreach", "fused") if name in group}
            if type(self.optimizer) in ELEMENTWISE:
                self.flat = [_flattened(self.optimizer, g) for g in self.optimizer.param_groups]
        make = self.recipe.schedule
        self.scheduler = make(self.optimizer) if make else None
        self.batch_dtype = torch.float64 if exact else TORCH_DTYPES[loop.dtype]

    def gradients(self, batch: Batch) -> tuple[float, list[torch.Tensor]]:
        tensors = {name: _tensor(a, self.batch_dtype) for name, a in batch.items()}
        with self.rounding.forward or contextlib.nullcontext():
            loss = self.loop.loss(self.module, tensors)
            found = torch.autograd.grad(loss, list(self.params.values()))
        return loss.item(), list(found)

    def update(self, given: list[list[torch.Tensor]]) -> None:
        """One update, from the gradients of as many batches as it accumulates."""
        recipe, owned = self.recipe, list(self.owned.values())
        with torch.no_grad(), self.rounding.update or contextlib.nullcontext():
            for p, first, *rest in zip(owned, *given, strict=True):
                p.grad = first.to(p.dtype, copy=True)
                for part in rest:
                    p.grad.add_(part.to(p.dtype))
                if recipe.accumulated == "mean" and recipe.accumulate > 1:
                    p.grad.div_(float(recipe.accumulate))
            by_one = None if self.rounding is AS_IT_IS else False
            if recipe.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(owned, recipe.clip_norm, foreach=by_one)
            if recipe.clip_value is not None:
                torch.nn.utils.clip_grad_value_(owned, recipe.clip_value, foreach=by_one)
            for whole, parts in self.flat:
                whole.grad = torch.cat([p.grad.flatten() for p in parts])
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        if self.masters is not self.module:
            with torch.no_grad():
                for name, p in self.params.items():
                    p.copy_(self.rounding.lowered(self.owned[name]))

    def tensors(self, gradients: Arrays) -> list[torch.Tensor]:
        """Given gradients, in the dtype that an update takes them in."""
        return [_tensor(gradients[name], p.dtype) for name, p in self.owned.items()]

    def arrays(self, grads: list[torch.Tensor]) -> dict[str, np.ndarray]:
        return {name: as_numpy(g) for name, g in zip(self.params, grads, strict=True)}

    def weights(self) -> dict[str, np.ndarray]:
        own = {name: as_numpy(p.detach()).copy() for name, p in self.owned.items()}
        return self.loop.to_paths(own)

    def state(self) -> dict[str, dict[str, np.ndarray]]:
        """moment -> path -> array, of what the optimizer keeps for every number of a parameter."""
        key = {id(p): name for name, p in self.owned.items()}
        wholes = self.flat or [(p, [p]) for p in self.owned.values()]
        found: dict[str, dict[str, np.ndarray]] = {}
        for whole, parts in wholes:
            for name, kept in self.optimizer.state.get(whole, {}).items():
                whole_size = isinstance(kept, torch.Tensor) and kept.shape == whole.shape
                if whole_size and name not in ("step", "mu_product"):
                    own = found.setdefault(name, {})
                    pieces = kept.flatten().split([p.numel() for p in parts])
                    for p, piece in zip(parts, pieces, strict=True):
                        own[key[id(p)]] = as_numpy(piece.view(p.shape)).copy()
        return {name: self._by_path(kept) for name, kept in found.items()}

    def _by_path(self, kept: Arrays) -> dict[str, np.ndarray]:
        """Of the paths that any of it goes to: an optimizer may leave parameters out."""
        held = {k: np.full(p.shape, float(k in kept)) for k, p in self.owned.items()}
        reached, whole = self.loop.to_paths(held), self.loop.to_paths(held | dict(kept))
        return {path: a for path, a in whole.items() if reached[path].any()}


ELEMENTWISE = tuple(getattr(torch.optim, name) for name in KINDS)
"""Optimizers that treat each number alone: several parameters may as well be one."""


def _flattened(optimizer, group) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The group's parameters made views of one, which is updated in their place; and they."""
    parts = group["params"]
    whole = torch.nn.Parameter(torch.cat([p.detach().flatten() for p in parts]))
    pieces = whole.detach().split([p.numel() for p in parts])
    states = [optimizer.state.pop(p, {}) for p in parts]
    for p, piece in zip(parts, pieces, strict=True):
        p.data = piece.view(p.shape)
    if states[0]:  # Adagrad has one before its first update
        optimizer.state[whole] = states[0] | {
            "sum": torch.cat([s["sum"].flatten() for s in states])
        }
    group["params"] = [whole]
    return whole, parts


def _tensor(a: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    if a.dtype.kind in "biu":
        return torch.from_numpy(a.astype(np.int64) if a.dtype.kind in "iu" else a.copy())
    return torch.from_numpy(a.astype(np.float64)).to(dtype)


@contextlib.contextmanager
def _kernels(rounding: _Rounding) -> Iterator[None]:
    with contextlib.nullcontext() if rounding is AS_IT_IS else plain_kernels():
        yield
