"""Build the optax chain that equals a torch optimizer, hyper-parameters included.

torch's and optax's defaults differ, and so do a few formulas: where eps is added, the initial value
of an accumulator, whether decay goes through the moments. Terms that are equal in optax come from
optax, the others from `terms`. This module does not import torch: it reads an optimizer's class
name and its param_groups. optax is a dependency of flax.
"""

from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_attn.training.optimizers import terms
from jax_attn.training.optimizers.schedules import (
    Group,
    cycled,
    looked_up,
    scheduled,
    steps_made,
)
from jax_attn.transfer import Layout, Problem, TransferError, flatten
from jax_attn.transfer.optimizer.torch_state import names_by_group

Names = Iterable[str] | Iterable[Iterable[str]]


def _sgd(group: Group) -> list[optax.GradientTransformation]:
    return _trace(group["momentum"], group["dampening"], group["nesterov"])


def _trace(
    momentum: terms.Number, dampening: float = 0.0, nesterov: bool = False
) -> list[optax.GradientTransformation]:
    if not np.any(momentum):
        return []
    if dampening or isinstance(momentum, np.ndarray):
        return [terms.dampened_trace(momentum, dampening, nesterov)]
    return [optax.trace(momentum, nesterov)]


def _adam(group: Group) -> list[optax.GradientTransformation]:
    b1, b2 = group["betas"]
    return [terms.scale_by_adam(b1, b2, group["eps"])]


def _adamax(group: Group) -> list[optax.GradientTransformation]:
    b1, b2 = group["betas"]
    return [terms.scale_by_adamax(b1, b2, group["eps"])]


def _nadam(group: Group) -> list[optax.GradientTransformation]:
    b1, b2 = group["betas"]
    return [terms.scale_by_nadam(b1, b2, group["eps"], group["momentum_decay"])]


def _rmsprop(group: Group) -> list[optax.GradientTransformation]:
    scale = optax.scale_by_stddev if group["centered"] else optax.scale_by_rms
    scaled = scale(group["alpha"], group["eps"], eps_in_sqrt=False)
    return [scaled, *_trace(group["momentum"])]


KINDS: dict[str, Callable[[Group], list[optax.GradientTransformation]]] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adam,
    "Adamax": _adamax,
    "NAdam": _nadam,
    "RMSprop": _rmsprop,
    "Adagrad": lambda g: [
        terms.scale_by_adagrad(g["eps"], g["initial_accumulator_value"], g["lr_decay"])
    ],
}
"""torch's class -> a function from a group's options to its terms, without decay and lr."""

_REFUSED = {
    "amsgrad": "torch keeps the largest of the uncorrected second moments, optax of the corrected",
    "differentiable": "differentiating through an update is not supported",
    "capturable": "its step and lr are tensors of a captured graph",
}


def optax_like(
    torch_optimizer: Any,
    *,
    schedule: Any = None,
    steps: int | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    accumulated: str = "sum",
    port: Any = None,
    layout: Layout | None = None,
    names: Names | None = None,
) -> optax.GradientTransformation:
    """Return the optax transformation that makes the same updates as `torch_optimizer`.

    Args:
      torch_optimizer: an SGD, Adam, AdamW, Adamax, NAdam, RMSprop or Adagrad of `torch.optim`. Its
        state is not read; `transfer.load_optimizer` transfers it. A number that is held in a tensor
        of one element, such as a learning rate, is read now.
      schedule: a torch scheduler of this optimizer, stepped once after each update. One that has
        made n steps has rates from the count n on, for a state that `transfer.load_optimizer`
        brings; earlier rates are NaN.
      steps: the number of updates for which the schedule has rates; later rates are NaN.
      clip_norm: the argument of `torch.nn.utils.clip_grad_norm_` before each update, including the
        1e-6 in its divisor.
      clip_value: the argument of `torch.nn.utils.clip_grad_value_` before each update.
      accumulate: the number of gradients in one update.
      accumulated: how gradients accumulate: "sum", as in torch's `.grad` after several calls of
        `backward()`, or "mean".
      port: a port of any kind. It is needed with `layout` and `names` if the optimizer has several
        param_groups, or a single one that lacks some parameters. Each Flax path then gets the
        options of its group; a path in no group is not updated.
      layout: the transfer table of the weights.
      names: the torch keys of the parameters, as `transfer.load_optimizer` takes them.

    Raises:
      TransferError: optax has no equivalent; the error lists every reason.
      TypeError: `torch_optimizer` is not an optimizer.
    """
    kind, groups = type(torch_optimizer).__name__, getattr(torch_optimizer, "param_groups", None)
    if groups is None:
        raise TypeError(f"torch_optimizer: expected one of torch.optim, got {kind}")
    problems = _option_problems(torch_optimizer, schedule, steps)
    problems += update_problems(clip_norm, clip_value, accumulate, accumulated)
    groups = [{name: _plain(value) for name, value in group.items()} for group in groups]
    rates: list[Any] = [group["lr"] for group in groups]
    if schedule is not None and steps is not None and not problems:
        tables, rate_problems = scheduled(schedule, steps)
        problems += rate_problems
        done = np.full(steps_made(schedule), np.nan)
        tables = [{k: np.append(done, row) for k, row in table.items()} for table in tables]
        rates = [looked_up(table["lr"]) for table in tables]
        groups = [cycled(*each) for each in zip(groups, tables, strict=False)]
    labels: dict[str, str] = {}
    if port is not None and layout is not None:
        labels, label_problems = group_labels(torch_optimizer, port, layout, names)
        problems += label_problems
    elif len(groups) > 1:
        text = f"expected the port and its table, because there are {len(groups)} param_groups"
        problems.append(Problem("missing", "port, layout", text))
    if problems:
        raise TransferError("optax_like", problems)
    chains = [_group(kind, group, rate) for group, rate in zip(groups, rates, strict=True)]
    chain = chains[0] if set(labels.values()) <= {"0"} else _by_label(chains, labels)
    if clip_norm is not None:
        chain = optax.chain(terms.clip_by_norm(float(clip_norm)), chain)
    if clip_value is not None:
        chain = optax.chain(optax.clip(float(clip_value)), chain)
    if accumulate > 1:
        accumulating = optax.MultiSteps(
            chain,
            accumulate,
            use_grad_mean=accumulated == "mean",
            accumulator_dtype=jnp.result_type(float),  # the default is float32, even for float64
        )
        chain = accumulating.gradient_transformation()
    return chain


def _group(kind: str, group: Group, rate: Any) -> optax.GradientTransformation:
    decoupled = group.get("decoupled_weight_decay", False)
    decay = [optax.add_decayed_weights(group["weight_decay"])] if group["weight_decay"] else []
    return optax.chain(
        *([optax.scale(-1.0)] if group["maximize"] else []),
        *([] if decoupled else decay),
        *KINDS[kind](group),
        *(decay if decoupled else []),
        optax.scale_by_learning_rate(rate),
    )


def _by_label(
    chains: list[optax.GradientTransformation], labels: Mapping[str, str]
) -> optax.GradientTransformation:
    """Return the transformation that updates each path by its own group's chain."""
    by_label = {str(i): chain for i, chain in enumerate(chains)} | {"none": optax.set_to_zero()}

    def label(keys: jax.tree_util.KeyPath, _: Any) -> str:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        return labels[path.removesuffix(".value")]

    return optax.partition(by_label, lambda params: jax.tree_util.tree_map_with_path(label, params))


def group_labels(
    torch_optimizer: Any, port: Any, layout: Layout, names: Names | None
) -> tuple[dict[str, str], list[Problem]]:
    """Return (Flax path -> its group's number, or "none"; why a path does not have one group).

    The transfer table carries group numbers here in place of weights.
    """
    groups = torch_optimizer.param_groups
    keys_by_group, problems = names_by_group(groups, names)
    if problems:
        return {}, problems
    layout = layout.spelled_as([key for keys in keys_by_group for key in keys])
    paths = {path: array.shape for path, array in flatten(port).items()}
    zeros = {path: np.zeros(shape, np.int8) for path, shape in paths.items()}
    try:
        tensors = {key: np.full(a.shape, -1, np.int32) for key, a in layout.to_torch(zeros).items()}
        for i, keys in enumerate(keys_by_group):
            for key in keys:
                if key not in tensors:
                    text = "expected a key of the transfer table, got another"
                    problems.append(Problem("unexpected", key, text))
                else:
                    tensors[key][...] = i
        carried = layout.to_flax(tensors, paths)
    except TransferError as error:
        return {}, problems + error.problems
    labels = {}
    for path, numbers in carried.items():
        group_numbers = np.unique(numbers)
        if len(group_numbers) > 1:
            text = f"expected one param_group, got parts of {group_numbers.tolist()}"
            problems.append(Problem("refused", path, text))
        labels[path] = "none" if group_numbers[0] < 0 else str(group_numbers[0])
    return labels, problems


def _option_problems(optimizer: Any, schedule: Any, steps: Any) -> list[Problem]:
    kind, module = type(optimizer).__name__, type(optimizer).__module__
    if kind not in KINDS or not module.startswith("torch.optim"):
        text = f"expected torch.optim's {', '.join(KINDS)}, got {module}.{kind}"
        return [Problem("refused", "torch_optimizer", text)]
    problems = []
    for i, group in enumerate(optimizer.param_groups):
        for option, value in group.items():
            where = f"param_groups[{i}].{option}"
            parts = value if type(value) is tuple else (value,)
            is_array = any(_is_tensor(part) and part.ndim for part in parts)
            if option in _REFUSED and value:
                problems.append(Problem("refused", where, f"got {value}: {_REFUSED[option]}"))
            elif option != "params" and is_array:
                text = "expected a number, or a tensor of no axes, got one of several axes"
                problems.append(Problem("refused", where, text))
        if schedule is None and "initial_lr" in group:
            text = "expected no scheduler, got one that sets this group's lr"
            problems.append(
                Problem("missing", f"param_groups[{i}].lr", text, "pass schedule= and steps=")
            )
    if schedule is not None and getattr(schedule, "optimizer", None) is not optimizer:
        text = f"expected a torch scheduler of torch_optimizer, got {type(schedule).__name__}"
        problems.append(Problem("refused", "schedule", text))
    both_or_neither = (schedule is None) == (steps is None)
    if not both_or_neither or not (steps is None or _is_count(steps)):
        text = f"expected the number of updates with a schedule, else None, got {steps!r}"
        problems.append(Problem("missing", "steps", text))
    return problems


def update_problems(
    clip_norm: Any, clip_value: Any, accumulate: Any, accumulated: Any
) -> list[Problem]:
    """Report invalid options for clipping and accumulation."""
    problems = []
    if clip_norm is not None and clip_value is not None:
        text = "expected one of them, because their order would be ambiguous, got both"
        problems.append(Problem("ambiguous", "clip_norm, clip_value", text))
    for name, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if value is not None and not (isinstance(value, Real) and float(value) > 0):
            problems.append(Problem("refused", name, f"expected a number above 0, got {value!r}"))
    if not _is_count(accumulate):
        text = f"expected a whole number above 0, got {accumulate!r}"
        problems.append(Problem("refused", "accumulate", text))
    if accumulated not in ("sum", "mean"):
        text = f"expected 'sum' or 'mean', got {accumulated!r}"
        problems.append(Problem("refused", "accumulated", text))
    return problems


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype") and not isinstance(value, Real)


def _plain(value: Any) -> Any:
    """Convert NumPy's scalars and tensors without axes to Python's numbers."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    is_scalar = isinstance(value, np.generic) or (_is_tensor(value) and value.ndim == 0)
    return value.item() if is_scalar else value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
