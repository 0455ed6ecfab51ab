"""The optimizers whose parity is shown, each option in a row, on a port of one linear layer.

An optimizer sees gradients, not the module: one layer does, and a case takes a second.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RMSprop, lr_scheduler

from jax_attn import transfer
from jax_attn.parity.training.arguments import LOSSES, with_loss
from jax_attn.parity.training.check_training import Training
from jax_attn.parity.training.jax_loop import PortLoop
from jax_attn.parity.training.torch_loop import Recipe

IN, OUT, BATCH, BATCHES, STEPS = 5, 3, 7, 3, 8


def _of(kind: type, **options) -> Recipe:
    return Recipe(lambda module: kind(module.parameters(), **options))


def _under(kind: type, schedule, **options) -> Recipe:
    return Recipe(lambda module: kind(module.parameters(), **options), schedule)


def _two_groups(module: torch.nn.Module) -> torch.optim.Optimizer:
    """The usual two: weights decay, biases do not."""
    weights = {"params": [module.weight]}
    return AdamW([weights, {"params": [module.bias], "weight_decay": 0.0}], 0.02, weight_decay=0.3)


def _weight_alone(kind: type, **options) -> Recipe:
    """The bias left out: it stands still."""
    return Recipe(lambda module: kind([module.weight], **options))


def _warm_up(optimizer):
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    then = lr_scheduler.CosineAnnealingLR(optimizer, 7, 0.01)
    return lr_scheduler.SequentialLR(optimizer, [first, then], [3])


@dataclass(frozen=True)
class TrainingCase:
    """recipe: of the torch side. scale: of the loss, and so of every gradient."""

    recipe: Recipe
    scale: float = 1.0
    dtype: str = "float32"
    name: str = field(default="", compare=False)


def _sgd(**options) -> Recipe:
    given = {name: options.pop(name) for name in ("lr", "momentum") if name in options}
    return Recipe(lambda m: SGD(m.parameters(), **({"lr": 0.1} | given)), **options)


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
        _under(Adam, lambda o: lr_scheduler.CosineAnnealingLR(o, 5, 0.001), lr=0.02)
    ),
    "warm-up, cosine": TrainingCase(_under(AdamW, _warm_up, lr=0.02)),
    "warm-up by a function": TrainingCase(
        _under(SGD, lambda o: lr_scheduler.LambdaLR(o, lambda t: min(1.0, (t + 1) / 4)), lr=0.1)
    ),
    "steps": TrainingCase(
        _under(SGD, lambda o: lr_scheduler.StepLR(o, 2, 0.5), lr=0.1, momentum=0.9)
    ),
    "accumulated, sum": TrainingCase(_sgd(momentum=0.9, accumulate=2)),
    "accumulated, mean": TrainingCase(_sgd(momentum=0.9, accumulate=2, accumulated="mean")),
    "SGD in bfloat16": TrainingCase(_of(SGD, lr=0.1, momentum=0.9), dtype="bfloat16"),
    "AdamW in bfloat16": TrainingCase(_of(AdamW, lr=0.02, weight_decay=0.2), dtype="bfloat16"),
}
"""name -> case: every optimizer, option, clip, schedule and accumulation that has an equal."""


def _scaled(loss: Any, by: float) -> Any:
    return lambda output, target: loss(output, target) * by


@cache
def layers(dtype: str) -> tuple[torch.nn.Linear, nnx.Linear]:
    """One layer in both frameworks."""
    rng = np.random.default_rng(1)
    reference = torch.nn.Linear(IN, OUT)
    with torch.no_grad():
        for p in reference.parameters():
            p.copy_(torch.from_numpy(rng.standard_normal(p.shape)))
    reference = reference.to(getattr(torch, dtype))
    dtypes = {"dtype": jax.numpy.dtype(dtype), "param_dtype": jax.numpy.dtype(dtype)}
    port = nnx.Linear(IN, OUT, rngs=nnx.Rngs(0), **dtypes)
    transfer.load(port, reference.state_dict(), transfer.LINEAR)
    return reference, port


@cache
def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(2)
    return [
        {
            "input": rng.standard_normal((BATCH, IN)).astype(np.float32),
            "target": rng.standard_normal((BATCH, OUT)).astype(np.float32),
        }
        for _ in range(BATCHES)
    ]


@cache
def prepared(name: str) -> Training:
    """The torch side of a case."""
    case = TRAINING_CASES[name]
    reference, port = layers(case.dtype)
    loss = _scaled(LOSSES["mse"][0], case.scale)
    return Training.of(
        reference,
        batches(),
        case.recipe,
        STEPS,
        loss,
        None,
        case.dtype,
        layout=transfer.LINEAR,
        port=port,
    )


@cache
def port_loop(scale: float, dtype: str) -> PortLoop:
    """The JAX side: one program for all cases of a scale and dtype."""
    _, port = layers(dtype)
    loss = with_loss(lambda module, input: module(input), _scaled(LOSSES["mse"][1], scale))
    return PortLoop(port, loss, batches(), dtype)


def judged(name: str, tx: Any = None):
    """The `Result` of a case; tx: in the place of `optax_like`'s."""
    case, training = TRAINING_CASES[name], prepared(name)
    made = tx or training.optax_like(layers(case.dtype)[1])
    return training.judge(port_loop(case.scale, case.dtype), made, name=f"training/{name}")
