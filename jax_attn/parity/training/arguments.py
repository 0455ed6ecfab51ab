"""Why a training cannot be checked: every reason, before anything runs."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flax import nnx

from jax_attn.dtypes import DTYPES
from jax_attn.parity.run import port as run_jax
from jax_attn.parity.run.float64_mode import TORCH_DTYPES
from jax_attn.parity.run.inputs_and_runs import is_float
from jax_attn.parity.run.port import x64_is_on
from jax_attn.parity.training.losses import LOSSES, TARGET
from jax_attn.parity.training.optimizers.optax_like import update_problems
from jax_attn.parity.training.optimizers.schedules import learning_rates
from jax_attn.parity.training.recipe import Recipe
from jax_attn.transfer import Layout


def validate(
    reference: Any,
    port: Any,
    layout: Any,
    batches: Any,
    recipe: Recipe,
    loss: Any,
    steps: Any,
    dtype: Any,
    port_optimizer: Any,
) -> None:
    """Raises TypeError or ValueError with every reason why this training cannot be checked."""
    if problems := _type_problems(reference, port, layout, recipe, port_optimizer):
        raise TypeError("\n".join(problems))
    problems = _batch_problems(batches) + _dtype_problems(reference, port, dtype)
    if isinstance(loss, str) and loss not in LOSSES:
        problems.append(
            f"loss: expected one of {', '.join(LOSSES)}, or two functions, got {loss!r}"
        )
    elif not isinstance(loss, str) and not (
        isinstance(loss, tuple) and len(loss) == 2 and all(map(callable, loss))
    ):
        problems.append(f"loss: expected torch's and JAX's, two functions, got {loss!r}")
    if not (isinstance(steps, int) and not isinstance(steps, bool) and steps > 0):
        problems.append(f"steps: expected a whole number above 0, got {steps!r}")
    else:
        problems += _schedule_problems(reference, recipe, steps)
    beside = (recipe.clip_norm, recipe.clip_value, recipe.accumulate, recipe.accumulated)
    problems += [f"{p.name}: {p.text}" for p in update_problems(*beside)]
    if problems:
        raise ValueError("\n".join(problems))


def _type_problems(
    reference: Any, port: Any, layout: Any, recipe: Recipe, port_optimizer: Any
) -> list[str]:
    problems = [
        f"{name}: expected a {kind.__name__}, got {type(value).__name__}"
        for name, value, kind in (
            ("reference", reference, torch.nn.Module),
            ("port", port, nnx.Module),
            ("layout", layout, Layout),
        )
        if not isinstance(value, kind)
    ]
    if not callable(recipe.optimizer):
        problems.append(
            "optimizer: expected a function of the module, as copies of it are trained, got "
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
    if dtype not in DTYPES:
        return [f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}"]
    if dtype == "float64" and not x64_is_on():
        return [
            "dtype: float64 needs JAX's x64 mode, else it is narrowed silently; expected "
            'jax.config.update("jax_enable_x64", True) before the port is built, got x64 off'
        ]
    problems = [
        f"reference parameter {name!r}: expected {dtype}, got {p.dtype}; convert the module first"
        for name, p in reference.named_parameters()
        if p.is_floating_point() and p.dtype != TORCH_DTYPES[dtype]
    ]
    return problems + [
        f"port parameter {path!r}: expected {dtype}, got {a.dtype.name}"
        for path, a in run_jax.parameters(port).items()
        if a.dtype.name != dtype
    ]


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
            problems.append(f"batches[{i}]: expected a dict of arrays with {TARGET!r} among them")
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
