"""Training cases that show the parity of optimizers, option by option, on one linear layer.

An optimizer sees gradients, not the module, so one layer is enough; a case takes a second.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import torch
from flax import nnx
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RMSprop, lr_scheduler

from jax_attn import transfer
from jax_attn.parity.judge.finding import Findings
from jax_attn.parity.judge.result import Result
from jax_attn.training.canaries import try_canaries
from jax_attn.training.judging import judge
from jax_attn.training.port_loop import PortLoop, PortTraining
from jax_attn.training.recipe import LOSSES, MakeScheduler, Recipe, with_loss
from jax_attn.training.reference_training import ReferenceTraining

IN, OUT, BATCH, BATCHES, STEPS = 5, 3, 7, 3, 8


def _of(
    kind: Callable[..., Optimizer], schedule: MakeScheduler | None = None, **options: Any
) -> Recipe:
    return Recipe(lambda module: kind(module.parameters(), **options), schedule)


def _sgd(momentum: float = 0.0, lr: float = 0.1, **fields: Any) -> Recipe:
    """Build a recipe of SGD. fields: the recipe's other fields."""
    return replace(_of(SGD, lr=lr, momentum=momentum), **fields)


def _two_groups(module: torch.nn.Module) -> Optimizer:
    """Build AdamW with the usual two groups: weights decay, biases do not."""
    groups: list[dict[str, Any]] = [
        {"params": [module.weight]},
        {"params": [module.bias], "weight_decay": 0.0},
    ]
    return AdamW(groups, 0.02, weight_decay=0.3)


def _weight_alone(kind: Callable[..., Optimizer], **options: Any) -> Recipe:
    """Build a recipe that leaves the bias out, so that it does not move."""
    return Recipe(lambda module: kind([module.weight], **options))


def _warm_up(optimizer: Optimizer) -> lr_scheduler.SequentialLR:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    then = lr_scheduler.CosineAnnealingLR(optimizer, 7, 0.01)
    return lr_scheduler.SequentialLR(optimizer, [first, then], [3])


def _one_cycle(optimizer: Optimizer) -> lr_scheduler.OneCycleLR:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)


@dataclass(frozen=True)
class TrainingCase:
    """A training. recipe: the torch side's. scale: a factor of the loss and of every gradient."""

    recipe: Recipe
    scale: float = 1.0
    dtype: str = "float32"


TRAINING_CASES: dict[str, TrainingCase] = {
    "SGD": TrainingCase(_of(SGD, lr=0.1)),
    "SGD, momentum": TrainingCase(_of(SGD, lr=0.1, momentum=0.9)),
    "SGD, dampening": TrainingCase(_of(SGD, lr=0.1, momentum=0.9, dampening=0.3)),
    "SGD, Nesterov, decay": TrainingCase(
        _of(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.2)
    ),
    "SGD, maximize": TrainingCase(_of(SGD, lr=0.1, weight_decay=0.2, maximize=True)),
    "Adam": TrainingCase(_of(Adam, lr=0.02)),
    "Adam, eps": TrainingCase(_of(Adam, lr=0.02, eps=0.01)),
    "Adam, decay": TrainingCase(_of(Adam, lr=0.02, weight_decay=0.2)),
    "AdamW": TrainingCase(_of(AdamW, lr=0.02, weight_decay=0.2)),
    "AdamW, two groups": TrainingCase(Recipe(_two_groups)),
    "AdamW, bias left out": TrainingCase(_weight_alone(AdamW, lr=0.02, weight_decay=0.2)),
    "SGD, bias left out": TrainingCase(_weight_alone(SGD, lr=0.1, momentum=0.9)),
    "Adamax": TrainingCase(_of(Adamax, lr=0.02, eps=0.01, weight_decay=0.2)),
    "AdamW, the rate a tensor": TrainingCase(
        Recipe(lambda module: AdamW(module.parameters(), torch.tensor(0.02), weight_decay=0.2))
    ),
    "NAdam": TrainingCase(_of(NAdam, lr=0.02, momentum_decay=0.1)),
    "NAdam, decoupled decay": TrainingCase(
        _of(NAdam, lr=0.02, weight_decay=0.2, decoupled_weight_decay=True)
    ),
    "RMSprop": TrainingCase(_of(RMSprop, lr=0.02, eps=0.01)),
    "RMSprop, centered, momentum": TrainingCase(
        _of(RMSprop, lr=0.005, centered=True, momentum=0.8, weight_decay=0.2)
    ),
    "Adagrad": TrainingCase(_of(Adagrad, lr=0.05)),
    "Adagrad, initial, lr_decay": TrainingCase(
        _of(Adagrad, lr=0.05, lr_decay=0.3, initial_accumulator_value=0.2, eps=0.01)
    ),
    "clip by norm": TrainingCase(_sgd(lr=1e3, clip_norm=1e-5), scale=1e-4),
    "clip by value": TrainingCase(_sgd(clip_value=0.2)),
    "cosine": TrainingCase(
        _of(Adam, lambda o: lr_scheduler.CosineAnnealingLR(o, 5, 0.001), lr=0.02)
    ),
    "warm-up, cosine": TrainingCase(_of(AdamW, _warm_up, lr=0.02)),
    "warm-up by a function": TrainingCase(
        _of(SGD, lambda o: lr_scheduler.LambdaLR(o, lambda t: min(1.0, (t + 1) / 4)), lr=0.1)
    ),
    "steps": TrainingCase(_of(SGD, lambda o: lr_scheduler.StepLR(o, 2, 0.5), lr=0.1, momentum=0.9)),
    "one cycle, momentum": TrainingCase(
        _of(SGD, _one_cycle, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.2)
    ),
    "one cycle, the first beta": TrainingCase(_of(AdamW, _one_cycle, lr=0.02)),
    "accumulated, sum": TrainingCase(_sgd(momentum=0.9, accumulate=2)),
    "accumulated, mean": TrainingCase(_sgd(momentum=0.9, accumulate=2, accumulated="mean")),
    "SGD in bfloat16": TrainingCase(_of(SGD, lr=0.1, momentum=0.9), dtype="bfloat16"),
    "AdamW in bfloat16": TrainingCase(_of(AdamW, lr=0.02, weight_decay=0.2), dtype="bfloat16"),
}
"""name -> case: every optimizer, option, clip, schedule and accumulation with an equivalent."""


def _scaled(loss: Callable[..., Any], by: float) -> Callable[..., Any]:
    return lambda output, target: loss(output, target) * by


@cache
def layers(dtype: str) -> tuple[torch.nn.Linear, nnx.Linear]:
    """Build one linear layer in both frameworks, with the same weights."""
    rng = np.random.default_rng(1)
    reference = torch.nn.Linear(IN, OUT)
    with torch.no_grad():
        for p in reference.parameters():
            p.copy_(torch.from_numpy(rng.standard_normal(p.shape)))
    reference = reference.to(getattr(torch, dtype))
    jax_dtype = jax.numpy.dtype(dtype)
    port = nnx.Linear(IN, OUT, dtype=jax_dtype, param_dtype=jax_dtype, rngs=nnx.Rngs(0))
    transfer.load(port, reference.state_dict(), transfer.LINEAR)
    return reference, port


@cache
def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(2)
    sizes = {"input": IN, "target": OUT}
    return [
        {name: rng.standard_normal((BATCH, n)).astype(np.float32) for name, n in sizes.items()}
        for _ in range(BATCHES)
    ]


@cache
def reference_training(name: str) -> ReferenceTraining:
    """Return the torch side of a case."""
    case = TRAINING_CASES[name]
    reference, port = layers(case.dtype)
    loss = with_loss(None, _scaled(LOSSES["mse"][0], case.scale))
    torch_side = (reference, batches(), case.recipe, STEPS, loss, case.dtype)
    return ReferenceTraining.of(*torch_side, layout=transfer.LINEAR, port=port)


@cache
def _canaries(name: str) -> Findings:
    return try_canaries(reference_training(name))


@cache
def _port_loop(scale: float, dtype: str) -> PortLoop:
    """Return the JAX side: one program for all cases of a scale and dtype."""
    _, port = layers(dtype)
    loss = with_loss(lambda module, input: module(input), _scaled(LOSSES["mse"][1], scale))
    return PortLoop(port, loss, batches(), dtype)


def judge_case(name: str, tx: optax.GradientTransformation | None = None) -> Result:
    """Judge a case. tx: the port's optimizer; the default is `optax_like`'s."""
    case, training = TRAINING_CASES[name], reference_training(name)
    tx = tx or training.optax_like(layers(case.dtype)[1])
    port = PortTraining(_port_loop(case.scale, case.dtype), tx, case.recipe.accumulate)
    return judge(training, port, _canaries(name), name=f"training/{name}")
