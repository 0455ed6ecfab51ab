"""The recipe of a training: its loss, an optimizer, a schedule, clipping and accumulation."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

from jax_attn.parity.run.inputs_and_runs import float_dtype, is_float
from jax_attn.training.optimizers.optax_like import optax_like
from jax_attn.training.optimizers.schedules import learning_rates
from jax_attn.training.paths import Paths

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


@dataclass(frozen=True)
class Recipe:
    """A training's optimizer and its options.

    optimizer: a function from a module to its torch optimizer. schedule: a function from that
    optimizer to its torch scheduler. The other fields are as for `optax_like`.
    """

    optimizer: MakeOptimizer
    schedule: MakeScheduler | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    accumulated: str = "sum"

    def with_options(self, **options: Any) -> "Recipe":
        """Return the same recipe with other options of the optimizer, in every param_group."""

        def changed(module: torch.nn.Module) -> torch.optim.Optimizer:
            optimizer = self.optimizer(module)
            for group in optimizer.param_groups:
                group |= options
            return optimizer

        return replace(self, optimizer=changed)

    def has_rates(self, module: torch.nn.Module, updates: int) -> bool:
        """Return whether the schedule, if any, has a rate for each of `updates` updates."""
        if self.schedule is None:
            return True
        scheduler = self.schedule(self.optimizer(copy.deepcopy(module)))
        return not learning_rates(scheduler, updates)[1]

    def optax_like(
        self, module: torch.nn.Module, updates: int, *, port: nnx.Module, paths: Paths
    ) -> optax.GradientTransformation:
        """Return the optax transformation for `port`; a schedule has `updates` rates.

        A parameter that the port holds under several names is updated under each.
        """
        module = copy.deepcopy(module)
        optimizer = self.optimizer(module)
        scheduler = self.schedule(optimizer) if self.schedule else None
        first = {id(p): name for name, p in module.named_parameters()}
        names = []
        for group in optimizer.param_groups:
            named = [(name, p) for p in group["params"] for name in paths.names[first[id(p)]]]
            names.append([name for name, _ in named])
            group["params"] = [p for _, p in named]
        return optax_like(
            optimizer,
            schedule=scheduler,
            steps=updates if scheduler else None,
            clip_norm=self.clip_norm,
            clip_value=self.clip_value,
            accumulate=self.accumulate,
            accumulated=self.accumulated,
            port=port,
            layout=paths.layout,
            names=names,
        )


TARGET = "target"


def _torch_wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _jax_wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


def _expect_target(target: torch.Tensor, shape: torch.Size, of: str) -> None:
    """Raise ValueError unless a target has the shape that a loss takes."""
    if target.shape != shape:
        raise ValueError(
            f"batches[…]['target']: expected shape {tuple(shape)}, {of}, got {tuple(target.shape)}"
        )


def _torch_cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    _expect_target(target, output.shape[:-1], "that of the output without its classes")
    logits = _torch_wide(output).flatten(0, -2)
    return torch.nn.functional.cross_entropy(logits, target.flatten())


def _jax_cross_entropy(output: jax.Array, target: jax.Array) -> jax.Array:
    logs = jax.nn.log_softmax(_jax_wide(output))
    return -jnp.take_along_axis(logs, target[..., None], axis=-1).mean()


def _torch_mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    _expect_target(target, output.shape, "the output's")
    return ((_torch_wide(output) - _torch_wide(target)) ** 2).mean()


def _jax_mse(output: jax.Array, target: jax.Array) -> jax.Array:
    return ((_jax_wide(output) - _jax_wide(target)) ** 2).mean()


LOSSES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., jax.Array]]] = {
    "cross_entropy": (_torch_cross_entropy, _jax_cross_entropy),
    "mse": (_torch_mse, _jax_mse),
}
"""name -> (torch's, JAX's): (output, target) -> scalar; in float32 for narrower outputs.

cross_entropy: the mean over output (…, classes) and integer target (…). mse: for equal shapes.
"""


def with_loss(
    call: Callable[..., Any] | None, loss: Callable[..., Any]
) -> Callable[[Any, Mapping[str, Any]], Any]:
    """Return (module, batch) -> scalar: `loss` of the output of `call`, or of the module itself."""

    def of_batch(module: Any, batch: Mapping[str, Any]) -> Any:
        inputs = {name: a for name, a in batch.items() if name != TARGET}
        output = call(module, **inputs) if call else module(**inputs)
        return loss(output, batch[TARGET])

    return of_batch


def rounded(batch: Mapping[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Return a batch with floating arrays rounded to `dtype`, so that all runs start equal."""
    return {k: a.astype(float_dtype(dtype)) if is_float(a.dtype) else a for k, a in batch.items()}
