"""Planted bugs of training ports, as data: each must fail in the case that is meant for it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from jax_attn.parity import torch_formulas as formulas
from jax_attn.parity.encoder import (
    ENCODER,
    Encoder,
    TorchEncoder,
    draws,
    dropped,
    ported,
    torch_encoder,
)
from jax_attn.parity.power import Kill
from jax_attn.parity.result import Result
from jax_attn.parity.run_jax import Port
from jax_attn.parity.run_torch import Reference
from jax_attn.parity.schedules import learning_rates, looked_up
from jax_attn.parity.signature import Inputs
from jax_attn.parity.training_cases import STEPS, TRAINING_CASES, judged, layers, prepared
from jax_attn.parity.verdict import Prepared

# --- optimizers ------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingMutant:
    """case: the one meant to see it. make: what stands in the place of the right optimizer."""

    case: str
    make: Callable[[], optax.GradientTransformation]


def _with(case: str, **wrong: Any) -> TrainingMutant:
    """The case's optimizer with other options."""

    def make():
        recipe = TRAINING_CASES[case].recipe
        fields = {name: wrong[name] for name in wrong if name in recipe.__dataclass_fields__}
        options = {name: value for name, value in wrong.items() if name not in fields}

        def optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
            made = recipe.optimizer(module)
            for group in made.param_groups:
                group |= options
            return made

        training = prepared(case)
        other = replace(recipe, optimizer=optimizer, **fields)
        changed = replace(training, loop=replace(training.loop, recipe=other))
        return changed.optax_like(layers("float32")[1])

    return TrainingMutant(case, make)


def _off_by_one(case: str, by: int = 1) -> TrainingMutant:
    """Every update with the rate of the one after it."""

    def make():
        optimizer = TRAINING_CASES[case].recipe.optimizer(torch.nn.Linear(1, 1))
        scheduler = TRAINING_CASES[case].recipe.schedule(optimizer)
        (rates,), _ = learning_rates(scheduler, STEPS + by)
        unscheduled = replace(TRAINING_CASES[case].recipe, schedule=None)
        training = prepared(case)
        at_one = replace(unscheduled, optimizer=lambda m: _at_rate(unscheduled.optimizer(m), 1.0))
        chain = replace(training, loop=replace(training.loop, recipe=at_one))
        made = chain.optax_like(layers("float32")[1])
        return optax.chain(made, optax.scale_by_schedule(looked_up(rates[by:])))

    return TrainingMutant(case, make)


def _at_rate(optimizer: torch.optim.Optimizer, rate: float) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["lr"] = rate
    return optimizer


def _uncorrected(lr: float = 0.02, b1: float = 0.9, b2: float = 0.999):
    """Adam's moments as they are."""

    def back(t):
        first = formulas.one_minus_power(b1, t + 1)
        return first / jnp.sqrt(formulas.one_minus_power(b2, t + 1))

    scaled = formulas.scale_by_adam(b1, b2, 1e-8)
    return optax.chain(scaled, optax.scale_by_schedule(back), optax.scale(-lr))


def _clipped_apart(max_norm: float) -> optax.GradientTransformation:
    """Each tensor by its own norm."""

    def update(gradients, state, params=None):
        def one(g):
            return g * jnp.minimum(1.0, max_norm / (jnp.linalg.norm(g) + 1e-6))

        return jax.tree.map(one, gradients), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _rate_before_momentum() -> optax.GradientTransformation:
    optimizer = TRAINING_CASES["steps"].recipe.optimizer(torch.nn.Linear(1, 1))
    (rates,), _ = learning_rates(TRAINING_CASES["steps"].recipe.schedule(optimizer), STEPS)
    return optax.chain(optax.scale_by_learning_rate(looked_up(rates)), optax.trace(0.9))


def _of(case: str, make: Callable, *args: Any, **options: Any) -> TrainingMutant:
    return TrainingMutant(case, functools.partial(make, *args, **options))


TRAINING_MUTANTS: dict[str, TrainingMutant] = {
    "SGD: momentum ignored": _with("SGD, momentum", momentum=0.0),
    "SGD: dampening ignored": _with("SGD, dampening", dampening=0.0),
    "SGD: the first buffer dampened too": _of(
        "SGD, dampening", lambda: optax.chain(optax.scale(0.7), optax.trace(0.9), optax.scale(-0.1))
    ),
    "SGD: Nesterov ignored": _with("SGD, Nesterov, decay", nesterov=False),
    "SGD: Nesterov unasked": _with("SGD, momentum", nesterov=True),
    "SGD: weight decay left out": _with("SGD, Nesterov, decay", weight_decay=0.0),
    "SGD: maximize ignored": _with("SGD, maximize", maximize=False),
    "Adam: eps inside the root": _of(
        "Adam, eps",
        lambda: optax.chain(optax.scale_by_adam(eps=0.0, eps_root=0.01), optax.scale(-0.02)),
    ),
    "Adam: eps corrected as v is at first": _of(
        "Adam, eps",
        lambda: optax.chain(
            formulas.scale_by_adam(0.9, 0.999, 0.01 / 0.001**0.5), optax.scale(-0.02)
        ),
    ),
    "Adam: bias correction left out": _of("Adam", _uncorrected),
    "Adam: betas swapped": _with("Adam", betas=(0.999, 0.9)),
    "Adam: b2 0.99 for 0.999": _with("Adam", betas=(0.9, 0.99)),
    "Adam: decay decoupled": _with("Adam, decay", decoupled_weight_decay=True),
    "AdamW: decay coupled": _with("AdamW", decoupled_weight_decay=False),
    "AdamW: decay without the learning rate": _of(
        "AdamW",
        lambda: optax.chain(
            formulas.scale_by_adam(0.9, 0.999, 1e-8),
            optax.scale(-0.02),
            optax.add_decayed_weights(-0.2),
        ),
    ),
    "AdamW: optax's own decay": _with("AdamW", weight_decay=1e-4),
    "AdamW: biases decay too": _with("AdamW, two groups", weight_decay=0.3),
    "NAdam: optax's own": _of("NAdam", optax.nadam, 0.02),
    "NAdam: momentum decay left out": _with("NAdam", momentum_decay=0.0),
    "RMSprop: eps inside the root": _of(
        "RMSprop", optax.rmsprop, 0.02, decay=0.99, eps=0.01, eps_in_sqrt=True
    ),
    "RMSprop: optax's own decay": _with("RMSprop", alpha=0.9),
    "RMSprop: not centred": _with("RMSprop, centered, momentum", centered=False),
    "Adagrad: optax's own start": _with("Adagrad", initial_accumulator_value=0.1),
    "Adagrad: eps inside the root": _of(
        "Adagrad, initial, lr_decay", optax.adagrad, 0.05, initial_accumulator_value=0.2, eps=0.01
    ),
    "Adagrad: lr_decay left out": _with("Adagrad, initial, lr_decay", lr_decay=0.0),
    "clip by norm: eps left out": _of(
        "clip by norm", lambda: optax.chain(optax.clip_by_global_norm(1e-5), optax.scale(-1e3))
    ),
    "clip by norm: each tensor apart": _of(
        "clip by norm", lambda: optax.chain(_clipped_apart(1e-5), optax.scale(-1e3))
    ),
    "clip by value: left out": _with("clip by value", clip_value=None),
    "cosine: off by one": _off_by_one("cosine"),
    "warm-up: off by one": _off_by_one("warm-up, cosine"),
    "steps: off by one": _off_by_one("steps"),
    "steps: the rate before the momentum": _of("steps", _rate_before_momentum),
    "accumulated: mean for sum": _with("accumulated, sum", accumulated="mean"),
    "accumulated: sum for mean": _with("accumulated, mean", accumulated="sum"),
    "accumulated: an update for each batch": _with("accumulated, mean", accumulate=1),
}
"""name -> what is wrong with an optimizer, and the case that is meant to see it."""


# --- layers beside attention ---------------------------------------------------------------------

VOCAB, WIDTH, HEADS, INNER, B, T = 11, 10, 2, 17, 3, 7


def _dropping(module: Encoder, tokens: jax.Array) -> jax.Array:
    return module(tokens, jnp.asarray(draws(0, B, T, WIDTH)))


@dataclass(frozen=True)
class EncoderMutant:
    """case: of `ENCODER_CASES`. options: of the `Encoder` with the bug. call: how it is called."""

    case: str
    options: dict[str, Any]
    call: Callable[..., jax.Array] | None = None


ENCODER_CASES = {
    "eval": {},
    "dropout": {"keep": draws(0, B, T, WIDTH)},
}
"""name -> the inputs besides the tokens."""

ENCODER_MUTANTS: dict[str, EncoderMutant] = {
    "LayerNorm: eps 1e-6 for 1e-5": EncoderMutant("eval", {"eps": 1e-6}),
    "GELU: tanh for erf": EncoderMutant("eval", {"gelu": jax.nn.gelu}),
    "dropout in eval": EncoderMutant("eval", {}, _dropping),
    "dropout: without 1/keep": EncoderMutant(
        "dropout", {"drop": lambda x, keep: x * keep.astype(x.dtype)}
    ),
    "dropout: polarity of the draw": EncoderMutant(
        "dropout", {"drop": lambda x, keep: dropped(x, ~keep)}
    ),
}
"""name -> what is wrong with a layer beside attention, and the case that is meant to see it."""


@cache
def reference_encoder() -> TorchEncoder:
    return torch_encoder(VOCAB, WIDTH, HEADS, INNER, seed=3)


@cache
def encoder_prepared(case: str) -> Prepared:
    """The torch side of a case of the encoder."""
    tokens = np.random.default_rng(4).integers(0, VOCAB, (B, T))
    given = Inputs.of({"tokens": tokens} | ENCODER_CASES[case], np.dtype("float32"))
    return Prepared(Reference(reference_encoder(), None, given), "float32")


def encoder_judged(case: str, mutant: EncoderMutant | None = None) -> Result:
    """The `Result` of a case of the encoder, right or with a bug."""
    theirs = encoder_prepared(case)
    port = ported(reference_encoder(), **(mutant.options if mutant else {}))
    bound = Port(port, mutant.call if mutant else None, theirs.reference.inputs)
    return theirs.judge(bound, ("jit",), to_torch=ENCODER.to_torch, name=f"encoder/{case}")


BESIDE = {name: f"encoder/{mutant.case}" for name, mutant in ENCODER_MUTANTS.items()}
BESIDE |= {name: f"training/{mutant.case}" for name, mutant in TRAINING_MUTANTS.items()}
"""name -> the case that is meant to see it, beside the built-in matrix."""


def tried(names: Sequence[str]) -> list[Kill]:
    """Each of these mutants in its case."""
    return [Kill.of_result(name, BESIDE[name], _judged(name)) for name in names]


def _judged(name: str) -> Result:
    if name in ENCODER_MUTANTS:
        return encoder_judged(ENCODER_MUTANTS[name].case, ENCODER_MUTANTS[name])
    mutant = TRAINING_MUTANTS[name]
    return judged(mutant.case, mutant.make())
