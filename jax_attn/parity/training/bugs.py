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

from jax_attn.parity.bugs.kill_report import Kill
from jax_attn.parity.checking.check import Prepared
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.port import Port
from jax_attn.parity.run.reference import Reference
from jax_attn.parity.training import optax_terms as formulas
from jax_attn.parity.training.cases import STEPS, TRAINING_CASES, judged, layers, prepared
from jax_attn.parity.training.encoder import (
    ENCODER,
    Encoder,
    TorchEncoder,
    draws,
    dropped,
    ported,
    torch_encoder,
)
from jax_attn.parity.training.schedules import learning_rates, looked_up
from jax_attn.parity.training.torch_loop import Recipe

# --- optimizers ------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingMutant:
    """case: the one meant to see it. make: what stands in the place of the right optimizer."""

    case: str
    make: Callable[[], optax.GradientTransformation]


def _like(case: str, recipe: Recipe) -> optax.GradientTransformation:
    """What equals another recipe's optimizer, on the case's port."""
    training = prepared(case)
    other = replace(training, loop=replace(training.loop, recipe=recipe))
    return other.optax_like(layers(TRAINING_CASES[case].dtype)[1])


def _with(case: str, **wrong: Any) -> TrainingMutant:
    """The case's optimizer with other options."""

    def make():
        recipe = TRAINING_CASES[case].recipe
        fields = {name: wrong[name] for name in wrong if name in recipe.__dataclass_fields__}
        options = {name: value for name, value in wrong.items() if name not in fields}
        return _like(case, replace(recipe, **fields).with_options(**options))

    return TrainingMutant(case, make)


def _off_by_one(case: str) -> TrainingMutant:
    """Every update with the rate of the one after it."""

    def make():
        optimizer = TRAINING_CASES[case].recipe.optimizer(torch.nn.Linear(1, 1))
        scheduler = TRAINING_CASES[case].recipe.schedule(optimizer)
        (rates,), _ = learning_rates(scheduler, STEPS + 1)
        at_one = replace(TRAINING_CASES[case].recipe, schedule=None).with_options(lr=1.0)
        return optax.chain(_like(case, at_one), optax.scale_by_schedule(looked_up(rates[1:])))

    return TrainingMutant(case, make)


def _uncorrected(lr: float = 0.02, b1: float = 0.9, b2: float = 0.999):
    """Adam's moments as they are."""

    def back(t):
        first = formulas.one_minus_power(b1, t + 1)
        return first / jnp.sqrt(formulas.one_minus_power(b2, t + 1))

    scaled = formulas.scale_by_adam(b1, b2, 1e-8)
    return optax.chain(scaled, optax.scale_by_schedule(back), optax.scale(-lr))


def _eps_inside(lr: float = 0.02, b1: float = 0.9, b2: float = 0.999, eps: float = 0.01):
    """Adam: √(v + eps) for √v + eps."""
    right = formulas.scale_by_adam(b1, b2, eps)

    def update(gradients, state, params=None):
        _, state = right.update(gradients, state)
        of_m, of_v = (formulas.one_minus_power(b, state.count) for b in (b1, b2))
        made = jax.tree.map(lambda m, v: m / of_m / jnp.sqrt(v / of_v + eps), state.mu, state.nu)
        return made, state

    return optax.chain(optax.GradientTransformation(right.init, update), optax.scale(-lr))


def _rounded(tree: Any) -> Any:
    """What is left of float32 arrays that were kept in bfloat16."""

    def one(a):
        return a.astype(jnp.bfloat16).astype(a.dtype) if jnp.issubdtype(a, jnp.floating) else a

    return jax.tree.map(one, tree)


def _masters_dropped(case: str) -> optax.GradientTransformation:
    """Weights kept in bfloat16 from update to update."""
    right = _like(case, TRAINING_CASES[case].recipe)

    def update(gradients, state, params):
        updates, state = right.update(gradients, state, params)
        kept = _rounded(optax.apply_updates(params, updates))
        return jax.tree.map(jnp.subtract, kept, params), state

    return optax.GradientTransformation(right.init, update)


def _moments_rounded(case: str) -> optax.GradientTransformation:
    """Moments kept in bfloat16."""
    right = _like(case, TRAINING_CASES[case].recipe)

    def update(gradients, state, params):
        updates, state = right.update(gradients, state, params)
        return updates, _rounded(state)

    return optax.GradientTransformation(right.init, update)


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
    "SGD: a rate 1% too large": _with("SGD", lr=0.101),
    "SGD: momentum ignored": _with("SGD, momentum", momentum=0.0),
    "SGD: dampening ignored": _with("SGD, dampening", dampening=0.0),
    "SGD: the first buffer dampened too": _of(
        "SGD, dampening", lambda: optax.chain(optax.scale(0.7), optax.trace(0.9), optax.scale(-0.1))
    ),
    "SGD: Nesterov ignored": _with("SGD, Nesterov, decay", nesterov=False),
    "SGD: Nesterov unasked": _with("SGD, momentum", nesterov=True),
    "SGD: weight decay left out": _with("SGD, Nesterov, decay", weight_decay=0.0),
    "SGD: maximize ignored": _with("SGD, maximize", maximize=False),
    "Adam: eps inside the root": _of("Adam, eps", _eps_inside),
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
    "SGD: what was left out is trained too": _of("SGD, bias left out", optax.sgd, 0.1, 0.9),
    "AdamW: what was left out decays": _of(
        "AdamW, bias left out",
        lambda: optax.chain(
            _like("AdamW, bias left out", TRAINING_CASES["AdamW, bias left out"].recipe),
            optax.stateless(lambda u, p: u | {"bias": -0.02 * 0.2 * p["bias"]}),
        ),
    ),
    "AdamW: biases decay too": _with("AdamW, two groups", weight_decay=0.3),
    "NAdam: optax's own": _of("NAdam", optax.nadam, 0.02),
    "NAdam: momentum decay left out": _with("NAdam", momentum_decay=0.0),
    "NAdam: decay coupled": _with("NAdam, decoupled decay", decoupled_weight_decay=False),
    "RMSprop: eps inside the root": _of(
        "RMSprop", optax.rmsprop, 0.02, decay=0.99, eps=0.01, eps_in_sqrt=True
    ),
    "RMSprop: optax's own decay": _with("RMSprop", alpha=0.9),
    "RMSprop: not centred": _with("RMSprop, centered, momentum", centered=False),
    "Adagrad: optax's own start": _with("Adagrad", initial_accumulator_value=0.1),
    "Adagrad: eps inside the root": _of(
        "Adagrad, initial, lr_decay",
        lambda: optax.chain(
            optax.scale_by_rss(0.2, 0.01),
            optax.scale_by_schedule(lambda t: -0.05 / (1 + 0.3 * t)),
        ),
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
    "warm-up by a function: off by one": _off_by_one("warm-up by a function"),
    "steps: off by one": _off_by_one("steps"),
    "steps: the rate before the momentum": _of("steps", _rate_before_momentum),
    "accumulated: mean for sum": _with("accumulated, sum", accumulated="mean"),
    "accumulated: sum for mean": _with("accumulated, mean", accumulated="sum"),
    "accumulated: an update for each batch": _with("accumulated, mean", accumulate=1),
    "bfloat16: SGD without master weights": _of(
        "SGD in bfloat16", _masters_dropped, "SGD in bfloat16"
    ),
    "bfloat16: SGD's momentum in it too": _of(
        "SGD in bfloat16", _moments_rounded, "SGD in bfloat16"
    ),
    "bfloat16: AdamW without master weights": _of(
        "AdamW in bfloat16", _masters_dropped, "AdamW in bfloat16"
    ),
    "bfloat16: AdamW's moments in it too": _of(
        "AdamW in bfloat16", _moments_rounded, "AdamW in bfloat16"
    ),
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


def beside(dtypes: Sequence[str], pattern: str) -> list[str]:
    """Those with the pattern in their case's name, in one of these dtypes; in any, of none."""
    own = {name: TRAINING_CASES[mutant.case].dtype for name, mutant in TRAINING_MUTANTS.items()}
    return [
        name
        for name, case in BESIDE.items()
        if pattern in case and (not dtypes or own.get(name, "float32") in dtypes)
    ]


def tried(names: Sequence[str]) -> list[Kill]:
    """Each of these mutants in its case."""
    return [Kill.of_result(name, BESIDE[name], _judged(name)) for name in names]


def _judged(name: str) -> Result:
    if name in ENCODER_MUTANTS:
        return encoder_judged(ENCODER_MUTANTS[name].case, ENCODER_MUTANTS[name])
    mutant = TRAINING_MUTANTS[name]
    return judged(mutant.case, mutant.make())
