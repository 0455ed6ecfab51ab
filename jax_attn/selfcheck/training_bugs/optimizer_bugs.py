"""Bugs of optimizers, as data: each must fail in the case designed to detect it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch.optim import lr_scheduler

from jax_attn.selfcheck.training_bugs.cases import STEPS, TRAINING_CASES, layers, reference_training
from jax_attn.training.bugs import with_options
from jax_attn.training.optimizers import terms
from jax_attn.training.optimizers.schedules import learning_rates, looked_up
from jax_attn.training.optimizers.terms import Tree
from jax_attn.training.recipe import Recipe


@dataclass(frozen=True)
class OptimizerBug:
    """A wrong optimizer. case: the one designed to detect it. make: builds the optimizer."""

    case: str
    make: Callable[[], optax.GradientTransformation]


def _like(case: str, recipe: Recipe) -> optax.GradientTransformation:
    """Return the optax equivalent of another recipe's optimizer, on the case's port."""
    training = reference_training(case)
    other = replace(training, loop=replace(training.loop, recipe=recipe))
    return other.optax_like(layers(TRAINING_CASES[case].dtype)[1])


def _with(case: str, **changed: Any) -> OptimizerBug:
    """Return the bug of the case's optimizer with other options."""

    def make() -> optax.GradientTransformation:
        return _like(case, with_options(TRAINING_CASES[case].recipe, **changed))

    return OptimizerBug(case, make)


def _rates(case: str, updates: int) -> np.ndarray:
    recipe = TRAINING_CASES[case].recipe
    assert recipe.schedule is not None
    (rates,), _ = learning_rates(recipe.schedule(recipe.optimizer(torch.nn.Linear(1, 1))), updates)
    return rates


def _off_by_one(case: str) -> OptimizerBug:
    """Return the bug that every update has the rate of the next one."""

    def make() -> optax.GradientTransformation:
        at_one = replace(TRAINING_CASES[case].recipe, schedule=None).with_options(lr=1.0)
        rates = looked_up(_rates(case, STEPS + 1)[1:])
        return optax.chain(_like(case, at_one), optax.scale_by_schedule(rates))

    return OptimizerBug(case, make)


def _not_cycled(case: str) -> OptimizerBug:
    """Return the bug that momentum stays as the optimizer has it, and only the rate is cycled."""

    def schedule(optimizer: torch.optim.Optimizer) -> lr_scheduler.OneCycleLR:
        return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1, cycle_momentum=False)

    return OptimizerBug(
        case, lambda: _like(case, replace(TRAINING_CASES[case].recipe, schedule=schedule))
    )


def _uncorrected() -> optax.GradientTransformation:
    """Build Adam without the bias correction of its moments."""

    def back(t: jax.Array) -> jax.Array:
        of_m, of_v = (terms.one_minus_power(b, t + 1) for b in (0.9, 0.999))
        return of_m / jnp.sqrt(of_v)

    scaled = terms.scale_by_adam(0.9, 0.999, 1e-8)
    return optax.chain(scaled, optax.scale_by_schedule(back), optax.scale(-0.02))


def _eps_inside() -> optax.GradientTransformation:
    """Build Adam with √(v + eps) in place of √v + eps."""
    right = terms.scale_by_adam(0.9, 0.999, 0.01)

    def update(gradients: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        _, state = right.update(gradients, state)
        of_m, of_v = (terms.one_minus_power(b, state.count) for b in (0.9, 0.999))
        scaled = jax.tree.map(lambda m, v: m / of_m / jnp.sqrt(v / of_v + 0.01), state.mu, state.nu)
        return scaled, state

    return optax.chain(optax.GradientTransformation(right.init, update), optax.scale(-0.02))


def _rounded(tree: Tree) -> Tree:
    """Round float arrays as if they were kept in bfloat16."""

    def one(a: jax.Array) -> jax.Array:
        return a.astype(jnp.bfloat16).astype(a.dtype) if jnp.issubdtype(a, jnp.floating) else a

    return jax.tree.map(one, tree)


def _after_update(
    case: str, change: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
) -> OptimizerBug:
    """Return a bug that changes each update of the case's optimizer.

    change: (updates, state, parameters) -> updates and state.
    """

    def make() -> optax.GradientTransformation:
        right = _like(case, TRAINING_CASES[case].recipe)

        def update(gradients: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
            updates, state = right.update(gradients, state, params)
            return change(updates, state, params)

        return optax.GradientTransformation(right.init, update)

    return OptimizerBug(case, make)


def _weights_rounded(updates: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
    """Keep weights in bfloat16 from update to update."""
    kept = _rounded(optax.apply_updates(params, updates))
    return jax.tree.map(jnp.subtract, kept, params), state


def _moments_rounded(updates: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
    """Keep moments in bfloat16."""
    return updates, _rounded(state)


def _clipped_apart(max_norm: float) -> optax.GradientTransformation:
    """Clip each tensor by its own norm."""

    def update(gradients: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        def one(g: jax.Array) -> jax.Array:
            return g * jnp.minimum(1.0, max_norm / (jnp.linalg.norm(g) + 1e-6))

        return jax.tree.map(one, gradients), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _rate_before_momentum() -> optax.GradientTransformation:
    rates = looked_up(_rates("steps", STEPS))
    return optax.chain(optax.scale_by_learning_rate(rates), optax.trace(0.9))


def _of(
    case: str, make: Callable[..., optax.GradientTransformation], *args: Any, **options: Any
) -> OptimizerBug:
    return OptimizerBug(case, partial(make, *args, **options))


OPTIMIZER_BUGS: dict[str, OptimizerBug] = {
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
        lambda: optax.chain(terms.scale_by_adam(0.9, 0.999, 0.01 / 0.001**0.5), optax.scale(-0.02)),
    ),
    "Adam: bias correction left out": _of("Adam", _uncorrected),
    "Adam: betas swapped": _with("Adam", betas=(0.999, 0.9)),
    "Adam: b2 0.99 for 0.999": _with("Adam", betas=(0.9, 0.99)),
    "Adam: decay decoupled": _with("Adam, decay", decoupled_weight_decay=True),
    "AdamW: decay coupled": _with("AdamW", decoupled_weight_decay=False),
    "AdamW: decay without the learning rate": _of(
        "AdamW",
        lambda: optax.chain(
            terms.scale_by_adam(0.9, 0.999, 1e-8),
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
    "AdamW: the rate of a tensor 1% too large": _with("AdamW, the rate a tensor", lr=0.0202),
    "Adamax: eps left out": _with("Adamax", eps=0.0),
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
            optax.scale_by_rss(0.2, 0.01), optax.scale_by_schedule(lambda t: -0.05 / (1 + 0.3 * t))
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
    "one cycle: the momentum not cycled": _not_cycled("one cycle, momentum"),
    "one cycle: the first beta not cycled": _not_cycled("one cycle, the first beta"),
    "accumulated: mean for sum": _with("accumulated, sum", accumulated="mean"),
    "accumulated: sum for mean": _with("accumulated, mean", accumulated="sum"),
    "accumulated: an update for each batch": _with("accumulated, mean", accumulate=1),
    "bfloat16: SGD without master weights": _after_update("SGD in bfloat16", _weights_rounded),
    "bfloat16: SGD's momentum in it too": _after_update("SGD in bfloat16", _moments_rounded),
    "bfloat16: AdamW without master weights": _after_update("AdamW in bfloat16", _weights_rounded),
    "bfloat16: AdamW's moments in it too": _after_update("AdamW in bfloat16", _moments_rounded),
}
"""name -> the bug of an optimizer, with the case designed to detect it."""
