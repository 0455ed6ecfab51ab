"""optax's optimizers against torch's: with torch's settings, and where one has no such setting."""

from collections.abc import Callable
from functools import partial
from typing import Any

import optax
import torch

from gallery.port import Port, Subject
from jax_attn.parity import TrainingPair
from jax_attn.selfcheck.training_bugs.cases import batches, layers
from jax_attn.transfer import LINEAR

RATE, STEPS = 0.02, 5
Torch = Callable[..., torch.optim.Optimizer]
_OF = torch.optim

PAIRS: dict[str, tuple[Torch, dict[str, Any], Callable[[], optax.GradientTransformation]]] = {
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
CLIPPED = {"adamw, clip_by_global_norm": 0.1, "adamw, clip_by_global_norm of tiny gradients": 1e-5}


def _subject(
    torch_optimizer: Torch,
    options: dict[str, Any],
    make: Callable[[], optax.GradientTransformation],
    clip_norm: float | None,
    dtype: str,
) -> Subject:
    reference, port = layers(dtype)
    return Subject(
        TrainingPair(
            reference,
            port,
            batches(),
            layout=LINEAR,
            loss="mse",
            optimizer=lambda module: torch_optimizer(module.parameters(), **{"lr": RATE} | options),
            port_optimizer=make(),
            clip_norm=clip_norm,
            port_call=lambda module, input: module(input),
            steps=STEPS,
        )
    )


def _clipped(norm: float) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(norm), optax.adamw(RATE, weight_decay=1e-2))


PORTS = (
    *(
        Port(f"optax {name}", "optax", partial(_subject, *pair, None), ["float32"])
        for name, pair in PAIRS.items()
    ),
    *(
        Port(
            f"optax {name}",
            "optax",
            partial(_subject, _OF.AdamW, {}, partial(_clipped, norm), norm),
            ["float32"],
        )
        for name, norm in CLIPPED.items()
    ),
)
