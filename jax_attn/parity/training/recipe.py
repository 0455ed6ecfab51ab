"""How parameters are updated: an optimizer, its schedule, clipping and accumulation."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import optax
import torch
from flax import nnx

from jax_attn.parity.training.optimizers.optax_like import optax_like
from jax_attn.parity.training.optimizers.schedules import learning_rates
from jax_attn.transfer import Layout

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


@dataclass(frozen=True)
class Recipe:
    """optimizer: module -> torch optimizer of it. schedule: that optimizer -> torch scheduler.

    The rest is as for `optax_like`.
    """

    optimizer: MakeOptimizer
    schedule: MakeScheduler | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    accumulated: str = "sum"

    def with_options(self, **options: Any) -> "Recipe":
        """The same with other options of the optimizer, in every param_group."""

        def changed(module: torch.nn.Module) -> torch.optim.Optimizer:
            optimizer = self.optimizer(module)
            for group in optimizer.param_groups:
                group |= options
            return optimizer

        return replace(self, optimizer=changed)

    def has_rates(self, module: torch.nn.Module, updates: int) -> bool:
        """Whether the schedule, if any, has a rate for so many updates."""
        if self.schedule is None:
            return True
        scheduler = self.schedule(self.optimizer(copy.deepcopy(module)))
        return not learning_rates(scheduler, updates)[1]

    def optax_like(
        self, module: torch.nn.Module, updates: int, *, port: nnx.Module, layout: Layout
    ) -> optax.GradientTransformation:
        """The optax transformation that makes these updates of `port`; rates for `updates`."""
        module = copy.deepcopy(module)
        optimizer = self.optimizer(module)
        scheduler = self.schedule(optimizer) if self.schedule else None
        key = {id(p): name for name, p in module.named_parameters()}
        return optax_like(
            optimizer,
            schedule=scheduler,
            steps=updates if scheduler else None,
            clip_norm=self.clip_norm,
            clip_value=self.clip_value,
            accumulate=self.accumulate,
            accumulated=self.accumulated,
            port=port,
            layout=layout,
            names=[[key[id(p)] for p in group["params"]] for group in optimizer.param_groups],
        )
