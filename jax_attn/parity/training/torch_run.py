"""One run of a torch module: as it is, in float64, or in float64 with every operation perturbed."""

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from jax_attn.parity.judge.budget import PRECISIONS
from jax_attn.parity.run.float64_mode import TORCH_DTYPES, Unperturbed
from jax_attn.parity.run.perturbed_mode import Perturbed
from jax_attn.parity.run.reference import plain_kernels
from jax_attn.parity.training.optimizers.optax_like import KINDS
from jax_attn.parity.training.recipe import Recipe
from jax_attn.parity.training.runs import LOW, Arrays, Batch, master_dtype
from jax_attn.transfer import as_numpy

TorchLoss = Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], torch.Tensor]

ELEMENTWISE = tuple(getattr(torch.optim, name) for name in KINDS)
"""Optimizers that treat each number alone: several parameters may as well be one."""


class PerturbedUpdate(Perturbed):
    """Perturbs, but changes no sign and no zero: a moment below 0 would have no root."""

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        perturbed = super()._stored(x)
        return torch.where(x * perturbed > 0, perturbed, 0.0)


@dataclass(frozen=True)
class Rounding:
    """What a float64 run is perturbed by, in forward and backward pass and in the update."""

    forward: Unperturbed
    update: Unperturbed

    @classmethod
    def drawn(cls, dtype: str, seed: int) -> "Rounding":
        """seed 0: the centre, exact."""
        if not seed:
            return cls(Unperturbed(), Unperturbed())
        low, own = PRECISIONS[dtype], PRECISIONS[master_dtype(dtype)]
        return cls(Perturbed(low, 2 * seed), PerturbedUpdate(own, 2 * seed + 1))

    def lowered(self, master: torch.Tensor) -> torch.Tensor:
        """A master weight as the module's dtype keeps it; in float64 no cast does that."""
        return self.forward._stored(master) if isinstance(self.forward, Perturbed) else master


class TorchRun:
    """A copy of a module with its master weights, optimizer and scheduler.

    rounding: None for torch as it is, in `dtype`; else the run is in float64.
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
        if not as_it_is:  # operation by operation, which is all that a mode sees
            for group in self._optimizer.param_groups:
                group |= {name: False for name in ("foreach", "fused") if name in group}
            if type(self._optimizer) in ELEMENTWISE:
                groups = self._optimizer.param_groups
                self._flattened = [_flattened(self._optimizer, group) for group in groups]
        self._scheduler = recipe.schedule(self._optimizer) if recipe.schedule else None
        self._batch_dtype = TORCH_DTYPES[dtype] if as_it_is else torch.float64

    def gradients(self, loss: TorchLoss, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
        """(the loss, torch key -> gradient) of one batch."""
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
        """One update, from the gradients of as many batches as it accumulates."""
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
        """Gradients by torch key, in the dtype that an update takes them in."""
        return {name: tensor(gradients[name], p.dtype) for name, p in self._masters.items()}

    def weights(self) -> dict[str, np.ndarray]:
        """torch key -> master weight."""
        return {name: as_numpy(p.detach()).copy() for name, p in self._masters.items()}

    def moments(self) -> dict[str, dict[str, np.ndarray]]:
        """moment -> torch key -> what the optimizer keeps for every number of a parameter."""
        key = {id(p): name for name, p in self._masters.items()}
        wholes = self._flattened or [(p, [p]) for p in self._masters.values()]
        moments: dict[str, dict[str, np.ndarray]] = {}
        for whole, parts in wholes:
            for name, kept in self._optimizer.state.get(whole, {}).items():
                elementwise = isinstance(kept, torch.Tensor) and kept.shape == whole.shape
                if not elementwise or name in ("step", "mu_product"):
                    continue
                pieces = kept.flatten().split([p.numel() for p in parts])
                for p, piece in zip(parts, pieces, strict=True):
                    array = as_numpy(piece.view(p.shape)).copy()
                    moments.setdefault(name, {})[key[id(p)]] = array
        return moments


def _flattened(
    optimizer: torch.optim.Optimizer, group: dict[str, Any]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(one parameter that is updated in the place of the group's, these as views of it)."""
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


def tensor(a: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Floating arrays in `dtype`, integers as int64, booleans as they are."""
    if a.dtype.kind in "biu":
        return torch.from_numpy(a.astype(np.int64) if a.dtype.kind in "iu" else a.copy())
    return torch.from_numpy(a.astype(np.float64)).to(dtype)
