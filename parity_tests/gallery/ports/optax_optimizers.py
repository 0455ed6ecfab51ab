"""optax's optimizers against torch's: with torch's settings, and where one has no such setting."""

from collections.abc import Callable
from functools import partial
from typing import Any

import optax
import torch

from gallery.port import Port, Subject
from jax_attn.parity import TrainingPair
from jax_attn.selfcheck.training_bugs.cases import batches, layers
from jax_attn.training.recipe import LOSSES
from jax_attn.transfer import LINEAR

RATE, STEPS = 0.02, 5
SMALL = 1e-4
"""A factor of the loss that gives gradients a norm of about 2e-4."""
Torch = Callable[..., torch.optim.Optimizer]
Optax = Callable[[], optax.GradientTransformation]
Loss = str | tuple[Callable[..., Any], Callable[..., Any]]
_OF = torch.optim

PAIRS: dict[str, tuple[Torch, dict[str, Any], Optax]] = {
    "sgd": (_OF.SGD, {}, lambda: optax.sgd(RATE)),
    "sgd, momentum": (_OF.SGD, {"momentum": 0.9}, lambda: optax.sgd(RATE, 0.9)),
    "sgd, Nesterov": (
        _OF.SGD,
        {"momentum": 0.9, "nesterov": True},
        lambda: optax.sgd(RATE, 0.9, nesterov=True),
    ),
    "adam": (_OF.Adam, {}, lambda: optax.adam(RATE)),
    "adamw": (_OF.AdamW, {}, lambda: optax.adamw(RATE, weight_decay=1e-2)),
    "adamw, defaults": (_OF.AdamW, {}, lambda: optax.adamw(RATE)),
    "amsgrad": (_OF.Adam, {"amsgrad": True}, lambda: optax.amsgrad(RATE)),
    "nadam": (_OF.NAdam, {}, lambda: optax.nadam(RATE)),
    "radam": (_OF.RAdam, {}, lambda: optax.radam(RATE)),
    "adamax": (_OF.Adamax, {}, lambda: optax.adamax(RATE)),
    "rmsprop": (
        _OF.RMSprop,
        {},
        lambda: optax.rmsprop(RATE, decay=0.99, eps_in_sqrt=False),
    ),
    "rmsprop, defaults": (_OF.RMSprop, {}, lambda: optax.rmsprop(RATE)),
    "adagrad": (
        _OF.Adagrad,
        {},
        lambda: optax.adagrad(RATE, initial_accumulator_value=0.0, eps=1e-10),
    ),
    "adagrad, defaults": (_OF.Adagrad, {}, lambda: optax.adagrad(RATE)),
    "adadelta": (_OF.Adadelta, {}, lambda: optax.adadelta(RATE, rho=0.9)),
    "rprop": (
        _OF.Rprop,
        {"lr": RATE},
        lambda: optax.rprop(RATE, 0.5, 1.2, min_step_size=1e-6, max_step_size=50.0),
    ),
}


def _small(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda output, target: SMALL * loss(output, target)


CLIPPED: dict[str, tuple[Torch, dict[str, Any], Optax, float, Loss]] = {
    # name -> as in PAIRS; the largest norm; the loss
    "adamw, clip_by_global_norm": (*PAIRS["adamw"], 0.1, "mse"),
    "sgd, clip_by_global_norm of small gradients": (
        _OF.SGD,
        {"lr": RATE / SMALL},
        lambda: optax.sgd(RATE / SMALL),
        1e-4,
        (_small(LOSSES["mse"][0]), _small(LOSSES["mse"][1])),
    ),
}


def _subject(
    torch_optimizer: Torch,
    options: dict[str, Any],
    make: Optax,
    clip_norm: float | None,
    loss: Loss,
    dtype: str,
) -> Subject:
    reference, port = layers(dtype)
    tx = make()
    if clip_norm is not None:
        tx = optax.chain(optax.clip_by_global_norm(clip_norm), tx)
    return Subject(
        TrainingPair(
            reference,
            port,
            batches(),
            layout=LINEAR,
            loss=loss,
            optimizer=lambda module: torch_optimizer(module.parameters(), **{"lr": RATE} | options),
            port_optimizer=tx,
            clip_norm=clip_norm,
            port_call=lambda module, input: module(input),
            steps=STEPS,
        )
    )


ROWS = {name: (*pair, None, "mse") for name, pair in PAIRS.items()} | CLIPPED
PORTS = tuple(
    Port(f"optax {name}", "optax", partial(_subject, *row), ["float32"])
    for name, row in ROWS.items()
)
