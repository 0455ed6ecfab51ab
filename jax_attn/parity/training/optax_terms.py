"""Optimizers after torch's formulas, as optax transformations, where optax has none that is equal.

optax takes 1 - bᵗ in float32, as 1 minus a power: of b2 = 0.999 the first update is 3e-5 of itself
off. Here it is -expm1(t·log b), right to the last places, as torch's float64 is.

Letters: g gradient, t updates made with this one, m and v moments, lr is applied afterwards.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class DampenedTraceState(NamedTuple):
    """count: updates made. trace: torch's momentum_buffer."""

    count: jax.Array
    trace: Any


class AdagradState(NamedTuple):
    """count: updates made. sum_of_squares: torch's sum."""

    count: jax.Array
    sum_of_squares: Any


class NAdamState(NamedTuple):
    """count, mu, nu: as of Adam. mu_product: the product of all momenta so far."""

    count: jax.Array
    mu: Any
    nu: Any
    mu_product: jax.Array


def clip_by_norm(max_norm: float) -> optax.GradientTransformation:
    """torch.nn.utils.clip_grad_norm_: g · min(1, max_norm / (‖all g‖ + 1e-6))."""

    def update(gradients, state, params=None):
        factor = jnp.minimum(1.0, max_norm / (optax.tree.norm(gradients) + 1e-6))
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def dampened_trace(momentum: float, dampening: float) -> optax.GradientTransformation:
    """torch.optim.SGD with dampening: b₁ = g₁, bₜ = momentum·bₜ₋₁ + (1 - dampening)·gₜ."""

    def init(params):
        return DampenedTraceState(_zero(), optax.tree.zeros_like(params))

    def update(gradients, state, params=None):
        taken = jnp.where(state.count == 0, 1.0, 1 - dampening)
        trace = jax.tree.map(
            lambda b, g: momentum * b + taken.astype(g.dtype) * g, state.trace, gradients
        )
        return trace, DampenedTraceState(optax.safe_increment(state.count), trace)

    return optax.GradientTransformation(init, update)


def scale_by_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """torch.optim.Adam and AdamW: m/(1 - b1ᵗ) / (√v/√(1 - b2ᵗ) + eps)."""

    def init(params):
        return optax.ScaleByAdamState(_zero(), *_zeros(params, 2))

    def update(gradients, state, params=None):
        count = optax.safe_increment(state.count)
        mu, nu = _moments(gradients, state, b1, b2)
        of_m, of_v = one_minus_power(b1, count), jnp.sqrt(one_minus_power(b2, count))

        def scaled(m, v):
            return m / of_m.astype(m.dtype) / (jnp.sqrt(v) / of_v.astype(v.dtype) + eps)

        return jax.tree.map(scaled, mu, nu), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_nadam(
    b1: float, b2: float, eps: float, momentum_decay: float
) -> optax.GradientTransformation:
    """torch.optim.NAdam: (g·(1 - μₜ)/(1 - Πμ) + m·μₜ₊₁/(1 - Πμ·μₜ₊₁)) / (√(v/(1 - b2ᵗ)) + eps).

    μₜ = b1·(1 - 0.96^(t·momentum_decay)/2), Πμ their product up to t.
    """

    def momentum(t):
        return b1 * (1 - 0.5 * 0.96 ** (t * momentum_decay))

    def init(params):
        return NAdamState(_zero(), *_zeros(params, 2), jnp.ones([], _scalar()))

    def update(gradients, state, params=None):
        count = optax.safe_increment(state.count)
        mu, nu = _moments(gradients, state, b1, b2)
        t = count.astype(_scalar())
        now, after = momentum(t), momentum(t + 1)
        product = state.mu_product * now
        of_g, of_m = (1 - now) / (1 - product), after / (1 - product * after)
        of_v = one_minus_power(b2, count)

        def scaled(g, m, v):
            over = of_g.astype(g.dtype) * g + of_m.astype(m.dtype) * m
            return over / (jnp.sqrt(v / of_v.astype(v.dtype)) + eps)

        return jax.tree.map(scaled, gradients, mu, nu), NAdamState(count, mu, nu, product)

    return optax.GradientTransformation(init, update)


def scale_by_adagrad(eps: float, initial: float, lr_decay: float) -> optax.GradientTransformation:
    """torch.optim.Adagrad: g / (√s + eps) / (1 + (t - 1)·lr_decay), s = initial + Σg²."""

    def init(params):
        return AdagradState(_zero(), optax.tree.full_like(params, initial))

    def update(gradients, state, params=None):
        sums = jax.tree.map(lambda s, g: s + g * g, state.sum_of_squares, gradients)
        slower = 1 + state.count.astype(_scalar()) * lr_decay

        def scaled(g, s):
            return g / (jnp.sqrt(s) + eps) / slower.astype(g.dtype)

        made = jax.tree.map(scaled, gradients, sums)
        return made, AdagradState(optax.safe_increment(state.count), sums)

    return optax.GradientTransformation(init, update)


def one_minus_power(b: float, count: jax.Array) -> jax.Array:
    """1 - b**count, for 0 ≤ b < 1, without the cancellation."""
    return -jnp.expm1(count.astype(_scalar()) * (math.log(b) if b else -math.inf))


def _moments(gradients, state, b1: float, b2: float):
    mu = jax.tree.map(lambda m, g: m + (1 - b1) * (g - m), state.mu, gradients)
    nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, gradients)
    return mu, nu


def _zero() -> jax.Array:
    return jnp.zeros([], jnp.int32)


def _zeros(params, times: int):
    return [optax.tree.zeros_like(params) for _ in range(times)]


def _scalar() -> jnp.dtype:
    """What scalars are computed in: float32, or float64 where JAX holds it."""
    return jnp.result_type(float)
