"""Optax transformations by torch's formulas, for optimizers that optax has no equal of.

optax computes 1 - bᵗ in float32, as 1 minus a power: with b2 = 0.999 the first update has a
relative error of 3e-5. Here it is -expm1(t·log b), accurate to the last places, as torch's float64.

Tree is a pytree of arrays, as in optax.

Letters: g gradient, t updates including this one, m and v moments; lr is applied afterwards.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any
Number = float | np.ndarray
"""A hyper-parameter, or one for each update, in float64."""


class DampenedTraceState(NamedTuple):
    """The state of `dampened_trace`. count: updates made. trace: torch's momentum_buffer."""

    count: jax.Array  # type: ignore[assignment]  # hides tuple's, as optax's own states do
    trace: Tree


class AdagradState(NamedTuple):
    """The state of `scale_by_adagrad`. count: updates made. sum_of_squares: torch's sum."""

    count: jax.Array  # type: ignore[assignment]  # hides tuple's, as optax's own states do
    sum_of_squares: Tree


class NAdamState(NamedTuple):
    """The state of `scale_by_nadam`.

    count, mu, nu: as in Adam. mu_product: the product of all momenta so far.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple's, as optax's own states do
    mu: Tree
    nu: Tree
    mu_product: jax.Array


def clip_by_norm(max_norm: float) -> optax.GradientTransformation:
    """Clip as torch.nn.utils.clip_grad_norm_ does: g · min(1, max_norm / (‖all g‖ + 1e-6))."""

    def update(gradients: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        factor = jnp.minimum(1.0, max_norm / (optax.tree.norm(gradients) + 1e-6))
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def dampened_trace(
    momentum: Number, dampening: float, nesterov: bool = False
) -> optax.GradientTransformation:
    """Apply torch's dampened momentum: b₁ = g₁, bₜ = momentum·bₜ₋₁ + (1 - dampening)·gₜ.

    Nesterov's is gₜ + momentum·bₜ.
    """

    def init(params: Tree) -> DampenedTraceState:
        return DampenedTraceState(_zero(), optax.tree.zeros_like(params))

    def update(
        gradients: Tree, state: DampenedTraceState, params: Tree = None
    ) -> tuple[Tree, DampenedTraceState]:
        share = jnp.where(state.count == 0, 1.0, 1 - dampening)
        kept = _at(momentum, state.count)
        trace = jax.tree.map(
            lambda b, g: _like(kept, b) * b + share.astype(g.dtype) * g, state.trace, gradients
        )
        ahead = jax.tree.map(lambda b, g: g + _like(kept, b) * b, trace, gradients)
        updates = ahead if nesterov else trace
        return updates, DampenedTraceState(optax.safe_increment(state.count), trace)

    return optax.GradientTransformation(init, update)


def scale_by_adam(b1: Number, b2: float, eps: float) -> optax.GradientTransformation:
    """Scale as torch.optim.Adam and AdamW do: m/(1 - b1ᵗ) / (√v/√(1 - b2ᵗ) + eps)."""

    def init(params: Tree) -> optax.ScaleByAdamState:
        return optax.ScaleByAdamState(_zero(), *_zeros(params, 2))

    def update(
        gradients: Tree, state: optax.ScaleByAdamState, params: Tree = None
    ) -> tuple[Tree, optax.ScaleByAdamState]:
        count = optax.safe_increment(state.count)
        mu, nu = _moments(gradients, state, b1, b2)
        of_m, of_v = one_minus_power(b1, count), jnp.sqrt(one_minus_power(b2, count))

        def scaled(m: jax.Array, v: jax.Array) -> jax.Array:
            return m / of_m.astype(m.dtype) / (jnp.sqrt(v) / of_v.astype(v.dtype) + eps)

        return jax.tree.map(scaled, mu, nu), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_adamax(b1: Number, b2: float, eps: float) -> optax.GradientTransformation:
    """Scale as torch.optim.Adamax does: m/(1 - b1ᵗ)/u, with u = max(b2·u, |g| + eps)."""

    def init(params: Tree) -> optax.ScaleByAdamState:
        return optax.ScaleByAdamState(_zero(), *_zeros(params, 2))

    def update(
        gradients: Tree, state: optax.ScaleByAdamState, params: Tree = None
    ) -> tuple[Tree, optax.ScaleByAdamState]:
        count = optax.safe_increment(state.count)
        mu = _first_moment(gradients, state, b1)
        nu = optax.tree.update_infinity_moment(gradients, state.nu, b2, eps)
        of_m = one_minus_power(b1, count)
        scaled = jax.tree.map(lambda m, u: m / of_m.astype(m.dtype) / u, mu, nu)
        return scaled, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_nadam(
    b1: Number, b2: float, eps: float, momentum_decay: float
) -> optax.GradientTransformation:
    """Scale as torch.optim.NAdam does.

    (g·(1 - μₜ)/(1 - Πμ) + m·μₜ₊₁/(1 - Πμ·μₜ₊₁)) / (√(v/(1 - b2ᵗ)) + eps), with
    μₜ = b1·(1 - 0.96^(t·momentum_decay)/2), and Πμ their product up to t.
    """

    def momentum(t: jax.Array, done: jax.Array) -> jax.Array:
        return _at(b1, done) * (1 - 0.5 * 0.96 ** (t * momentum_decay))

    def init(params: Tree) -> NAdamState:
        mu, nu = _zeros(params, 2)
        return NAdamState(_zero(), mu, nu, jnp.ones([], _scalar()))

    def update(gradients: Tree, state: NAdamState, params: Tree = None) -> tuple[Tree, NAdamState]:
        count = optax.safe_increment(state.count)
        mu, nu = _moments(gradients, state, b1, b2)
        t = count.astype(_scalar())
        now, after = momentum(t, state.count), momentum(t + 1, state.count)
        product = state.mu_product * now
        of_g, of_m = (1 - now) / (1 - product), after / (1 - product * after)
        of_v = one_minus_power(b2, count)

        def scaled(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            over = of_g.astype(g.dtype) * g + of_m.astype(m.dtype) * m
            return over / (jnp.sqrt(v / of_v.astype(v.dtype)) + eps)

        return jax.tree.map(scaled, gradients, mu, nu), NAdamState(count, mu, nu, product)

    return optax.GradientTransformation(init, update)


def scale_by_adagrad(eps: float, initial: float, lr_decay: float) -> optax.GradientTransformation:
    """Scale as torch.optim.Adagrad: g / (√s + eps) / (1 + (t - 1)·lr_decay), s = initial + Σg²."""

    def init(params: Tree) -> AdagradState:
        return AdagradState(_zero(), optax.tree.full_like(params, initial))

    def update(
        gradients: Tree, state: AdagradState, params: Tree = None
    ) -> tuple[Tree, AdagradState]:
        sums = jax.tree.map(lambda s, g: s + g * g, state.sum_of_squares, gradients)
        slowing = 1 + state.count.astype(_scalar()) * lr_decay

        def scaled(g: jax.Array, s: jax.Array) -> jax.Array:
            return g / (jnp.sqrt(s) + eps) / slowing.astype(g.dtype)

        scaled_gradients = jax.tree.map(scaled, gradients, sums)
        return scaled_gradients, AdagradState(optax.safe_increment(state.count), sums)

    return optax.GradientTransformation(init, update)


def one_minus_power(b: Number, count: jax.Array) -> jax.Array:
    """Return 1 - b**count without cancellation, for 0 ≤ b < 1."""
    if isinstance(b, np.ndarray):
        with np.errstate(divide="ignore"):
            log = _at(np.log(b), count - 1)
    else:
        log = math.log(b) if b else -math.inf
    return -jnp.expm1(count.astype(_scalar()) * log)


def _at(number: Number, done: jax.Array) -> Any:
    """Return a number, or that of the update after `done` others; NaN beyond a table."""
    if not isinstance(number, np.ndarray):
        return number
    return jnp.asarray(number, _scalar()).at[done].get(mode="fill", fill_value=jnp.nan)


def _like(number: Any, a: jax.Array) -> Any:
    return number.astype(a.dtype) if isinstance(number, jax.Array) else number


def _moments(
    gradients: Tree, state: optax.ScaleByAdamState | NAdamState, b1: Number, b2: float
) -> tuple[Tree, Tree]:
    mu = _first_moment(gradients, state, b1)
    nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, gradients)
    return mu, nu


def _first_moment(gradients: Tree, state: optax.ScaleByAdamState | NAdamState, b1: Number) -> Tree:
    share = _at(1 - b1, state.count)
    return jax.tree.map(lambda m, g: m + _like(share, g) * (g - m), state.mu, gradients)


def _zero() -> jax.Array:
    return jnp.zeros([], jnp.int32)


def _zeros(params: Tree, times: int) -> list[Tree]:
    return [optax.tree.zeros_like(params) for _ in range(times)]


def _scalar() -> jnp.dtype:
    """Return the dtype of scalars: float32, or float64 if JAX has it enabled."""
    return jnp.result_type(float)
