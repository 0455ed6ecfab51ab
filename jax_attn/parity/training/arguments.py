"""What a training check is given: the losses, and every reason to refuse the rest, at once."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jax_attn.dtypes import DTYPES
from jax_attn.parity.run import port as run_jax
from jax_attn.parity.run.inputs_and_runs import is_float
from jax_attn.parity.run.torch_modes import TORCH_DTYPES
from jax_attn.parity.training.optax_like import call_problems
from jax_attn.parity.training.schedules import learning_rates
from jax_attn.transfer import Layout

TARGET = "target"


def _torch_wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _jax_wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


def _torch_cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logits = _torch_wide(output).flatten(0, -2)
    return torch.nn.functional.cross_entropy(logits, target.flatten())


def _jax_cross_entropy(output: jax.Array, target: jax.Array) -> jax.Array:
    logs = jax.nn.log_softmax(_jax_wide(output))
    return -jnp.take_along_axis(logs, target[..., None], axis=-1).mean()


def _mean_square(wide: Callable) -> Callable:
    return lambda output, target: ((wide(output) - wide(target)) ** 2).mean()


LOSSES = {
    "cross_entropy": (_torch_cross_entropy, _jax_cross_entropy),
    "mse": (_mean_square(_torch_wide), _mean_square(_jax_wide)),
}
"""name -> (torch's, JAX's): (output, target) -> scalar; in float32 for narrower outputs.

cross_entropy: of output (…, classes) and integer target (…), the mean; mse: of equal shapes.
"""


def with_loss(call: Callable | None, loss: Callable) -> Callable[[Any, Mapping[str, Any]], Any]:
    """(module, batch) -> scalar."""

    def of(module, batch):
        given = {name: a for name, a in batch.items() if name != TARGET}
        return loss(call(module, **given) if call else module(**given), batch[TARGET])

    return of


def rounded(batch: Mapping[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Floating arrays as `dtype` holds them, so that every run starts from the same numbers."""
    kept = run_jax.float_dtype(dtype)
    return {k: a.astype(kept) if is_float(a.dtype) else a for k, a in batch.items()}


def validate(reference, port, layout, batches, recipe, loss, steps, dtype, port_optimizer) -> None:
    """Every reason why this training cannot be checked, at once."""
    wrong = [
        f"{name}: expected a {kind.__name__}, got {type(value).__name__}"
        for name, value, kind in (
            ("reference", reference, torch.nn.Module),
            ("port", port, nnx.Module),
            ("layout", layout, Layout),
        )
        if not isinstance(value, kind)
    ]
    if not callable(recipe.optimizer):
        wrong.append(
            "optimizer: expected a function of the module, as copies of it are trained, got "
            f"{type(recipe.optimizer).__name__}; such as lambda m: torch.optim.SGD(m.parameters())"
        )
    if recipe.schedule is not None and not callable(recipe.schedule):
        got = type(recipe.schedule).__name__
        wrong.append(f"schedule: expected a function of the optimizer, got {got}")
    if port_optimizer is not None and not all(
        callable(getattr(port_optimizer, name, None)) for name in ("init", "update")
    ):
        wrong.append(
            "port_optimizer: expected an optax transformation, with init and update, got "
            f"{type(port_optimizer).__name__}"
        )
    if wrong:
        raise TypeError("\n".join(wrong))
    problems = _batch_problems(batches)
    if dtype not in DTYPES:
        problems.append(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    elif dtype == "float64" and not jax.config.jax_enable_x64:
        problems.append(
            "dtype: float64 needs JAX's x64 mode, else it is narrowed silently; expected "
            'jax.config.update("jax_enable_x64", True) before the port is built, got x64 off'
        )
    else:
        problems += [
            f"reference parameter {name!r}: expected {dtype}, got {p.dtype}; convert the module "
            "first"
            for name, p in reference.named_parameters()
            if p.is_floating_point() and p.dtype != TORCH_DTYPES[dtype]
        ]
        problems += [
            f"port parameter {path!r}: expected {dtype}, got {a.dtype.name}"
            for path, a in run_jax.parameters(port).items()
            if a.dtype.name != dtype
        ]
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
    elif recipe.schedule is not None:
        problems += _schedule_problems(reference, recipe, steps)
    called = (recipe.clip_norm, recipe.clip_value, recipe.accumulate, recipe.accumulated)
    problems += [f"{p.name}: {p.text}" for p in call_problems(*called)]
    if problems:
        raise ValueError("\n".join(problems))


def _schedule_problems(reference, recipe, steps: int) -> list[str]:
    made = recipe.schedule(recipe.optimizer(copy.deepcopy(reference)))
    if not isinstance(made, torch.optim.lr_scheduler.LRScheduler):
        return [f"schedule: expected it to make a torch scheduler, got {type(made).__name__}"]
    _, problems = learning_rates(made, steps)
    return [f"{p.name}: {p.text}" for p in problems]


def _batch_problems(batches: Any) -> list[str]:
    if not isinstance(batches, Sequence) or not batches:
        return [f"batches: expected a list of dicts of NumPy arrays, got {type(batches).__name__}"]
    problems, first = [], None
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
            found = {name: (a.shape, a.dtype.name) for name, a in batch.items()}
            first = first or found
            if found != first:
                problems.append(f"batches[{i}]: expected one set of shapes, {first}, got {found}")
    return problems
