"""Validate the arguments of `check_training`, and list every reason why one is wrong."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flax import nnx

from jax_attn.dtypes import DTYPES
from jax_attn.parity.checking.arguments import dtype_problems, type_problems, x64_problems
from jax_attn.parity.run.inputs_and_runs import is_float
from jax_attn.parity.run.port import parameters
from jax_attn.training.optimizers.optax_like import update_problems
from jax_attn.training.optimizers.schedules import learning_rates
from jax_attn.training.recipe import LOSSES, TARGET, Recipe


def expect_valid(
    reference: torch.nn.Module,
    port: nnx.Module,
    batches: Any,
    recipe: Recipe,
    loss: Any,
    steps: Any,
    dtype: Any,
) -> None:
    """Raise ValueError with every reason why this training cannot be checked."""
    problems = _batch_problems(batches) + _dtype_problems(reference, port, dtype)
    if optimizer_problems := _optimizer_problems(reference, recipe):
        raise ValueError("\n".join([*problems, *optimizer_problems]))
    if isinstance(loss, str) and loss not in LOSSES:
        problems.append(
            f"loss: expected one of {', '.join(LOSSES)}, or two functions, got {loss!r}"
        )
    elif not isinstance(loss, str) and not (
        isinstance(loss, tuple) and len(loss) == 2 and all(map(callable, loss))
    ):
        problems.append(f"loss: expected torch's and JAX's functions, as a pair, got {loss!r}")
    if not (isinstance(steps, int) and not isinstance(steps, bool) and steps > 0):
        problems.append(f"steps: expected a whole number above 0, got {steps!r}")
    else:
        problems += _schedule_problems(reference, recipe, steps)
    options = (recipe.clip_norm, recipe.clip_value, recipe.accumulate, recipe.accumulated)
    problems += [f"{p.name}: {p.text}" for p in update_problems(*options)]
    if problems:
        raise ValueError("\n".join(problems))


def training_type_problems(
    reference: Any, port: Any, layout: Any, recipe: Recipe, port_optimizer: Any
) -> list[str]:
    """List the arguments that have another type than `check_training` takes.

    recipe: only its optimizer and its schedule are examined. port_optimizer: None if the port is
    trained with `optax_like`.
    """
    problems = type_problems(reference=reference, port=port, layout=layout)
    if not callable(recipe.optimizer):
        problems.append(
            "optimizer: expected a function of the module, because copies of it are trained, got "
            f"{type(recipe.optimizer).__name__}; such as lambda m: torch.optim.SGD(m.parameters())"
        )
    if recipe.schedule is not None and not callable(recipe.schedule):
        got = type(recipe.schedule).__name__
        problems.append(f"schedule: expected a function of the optimizer, got {got}")
    if port_optimizer is not None and not all(
        callable(getattr(port_optimizer, name, None)) for name in ("init", "update")
    ):
        problems.append(
            "port_optimizer: expected an optax transformation, with init and update, got "
            f"{type(port_optimizer).__name__}"
        )
    return problems


def _dtype_problems(reference: torch.nn.Module, port: nnx.Module, dtype: Any) -> list[str]:
    return [*x64_problems(dtype), *dtype_problems(reference, dtype)] + [
        f"port parameter {path!r}: expected {dtype}, got {a.dtype.name}"
        for path, a in parameters(port).items()
        if dtype in DTYPES and a.dtype.name != dtype
    ]


def _optimizer_problems(reference: torch.nn.Module, recipe: Recipe) -> list[str]:
    optimizer = recipe.optimizer(copy.deepcopy(reference))
    if isinstance(optimizer, torch.optim.Optimizer):
        return []
    got = type(optimizer).__name__
    return [f"optimizer: expected it to make a torch.optim optimizer, got {got}"]


def _schedule_problems(reference: torch.nn.Module, recipe: Recipe, steps: int) -> list[str]:
    if recipe.schedule is None:
        return []
    scheduler = recipe.schedule(recipe.optimizer(copy.deepcopy(reference)))
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        got = type(scheduler).__name__
        return [f"schedule: expected it to make a torch scheduler, got {got}"]
    _, problems = learning_rates(scheduler, steps)
    return [f"{p.name}: {p.text}" for p in problems]


def _batch_problems(batches: Any) -> list[str]:
    if not isinstance(batches, Sequence) or not batches:
        return [f"batches: expected a list of dicts of NumPy arrays, got {type(batches).__name__}"]
    problems: list[str] = []
    first: dict[str, tuple] = {}
    for i, batch in enumerate(batches):
        if not isinstance(batch, Mapping) or TARGET not in batch:
            problems.append(f"batches[{i}]: expected a dict of arrays that contains {TARGET!r}")
            continue
        strangers = [
            name
            for name, a in batch.items()
            if not (isinstance(a, np.ndarray) and (a.dtype.kind in "biu" or is_float(a.dtype)))
        ]
        problems += [f"batches[{i}][{name!r}]: expected a NumPy array" for name in strangers]
        if not strangers:
            shapes = {name: (a.shape, a.dtype.name) for name, a in batch.items()}
            first = first or shapes
            if shapes != first:
                problems.append(f"batches[{i}]: expected one set of shapes, {first}, got {shapes}")
    return problems
