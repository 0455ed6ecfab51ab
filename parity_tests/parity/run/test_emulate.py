"""Emulated matrix units: every product rounded, wherever it stands, and nothing else."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from helpers.parity.rounded_products import (
    U32,
    D,
    H,
    T,
    accumulation_bound,
    excess,
    operands,
    product,
    rounded,
)
from jax_attn.parity.run import emulate as emulate_module
from jax_attn.parity.run.emulate import UNITS, emulate

BITS = {"mxu": 7, "tf32": 10}


def test_rounding_to_seven_bits_is_bfloat16():
    x = operands()[0]
    assert np.array_equal(rounded(x, 7), x.astype(ml_dtypes.bfloat16).astype(np.float64))


@pytest.mark.parametrize(("unit", "bits"), BITS.items(), ids=BITS)
def test_operands_are_rounded_and_summed_in_float32(unit, bits):
    a, b = operands()
    want, bound = rounded(a, bits) @ rounded(b, bits), accumulation_bound(a, b)
    assert excess(emulate(product, unit)(a, b), want, bound) <= 1
    assert excess(product(a, b), want, bound) > 1, "a float32 product passes: no power"


# --------------------------------------------------------------- wherever it stands


@jax.custom_vjp
def with_own_vjp(a, b):
    return a @ b


with_own_vjp.defvjp(lambda a, b: (a @ b, (a, b)), lambda ab, g: (g @ ab[1].T, ab[0].T @ g))


@jax.custom_jvp
def with_own_jvp(a, b):
    return a @ b


@with_own_jvp.defjvp
def _(primals, tangents):
    (a, b), (da, db) = primals, tangents
    return a @ b, da @ b + a @ db


def in_scan(a, b):
    return lax.scan(lambda b, row: (b, row @ b), b, a)[1]


def in_fori_loop(a, b):
    def step(i, out):
        return out.at[i].set(jnp.take(a, i, axis=0) @ b)

    return lax.fori_loop(0, T, step, jnp.zeros((T, H), a.dtype))


def in_while(a, b):
    def step(state):
        return state[0] + 1, a @ b

    return lax.while_loop(lambda state: state[0] < 1, step, (0, jnp.zeros((T, H), a.dtype)))[1]


def in_cond(a, b):
    return lax.cond(a[0, 0] < jnp.inf, lambda: a @ b, lambda: jnp.zeros((T, H), a.dtype))


def in_switch(a, b):
    return lax.switch(1, [lambda a, b: 0 * (a @ b), jnp.matmul], a, b)


def in_everything(a, b):
    scanned = jax.jit(jax.checkpoint(in_scan))
    return lax.cond(a[0, 0] < jnp.inf, scanned, lambda a, b: jnp.zeros((T, H), a.dtype), a, b)


WHERE = {
    "jit": jax.jit(product),
    "checkpoint": jax.checkpoint(product),
    "scan": in_scan,
    "fori_loop": in_fori_loop,
    "while": in_while,
    "cond": in_cond,
    "switch": in_switch,
    "custom_vjp": with_own_vjp,
    "custom_jvp": with_own_jvp,
    "vmap": jax.vmap(jnp.matmul, in_axes=(0, None)),
    "einsum": lambda a, b: jnp.einsum("td,dh->th", a, b),
    "nested": in_everything,
    "closed over": lambda a, b: jax.jit(lambda a: a @ b)(a),
}


def is_rounded(fn) -> bool:
    a, b = operands()
    return excess(fn(a, b), rounded(a, 7) @ rounded(b, 7), accumulation_bound(a, b)) <= 1


@pytest.mark.parametrize("fn", WHERE.values(), ids=WHERE)
def test_a_product_is_rounded_wherever_it_stands(fn):
    assert is_rounded(emulate(fn, "mxu"))
    assert not is_rounded(fn)


@pytest.mark.parametrize("where", ["jit", "checkpoint", "scan", "while", "cond", "nested"])
def test_a_product_missed_inside_a_jaxpr_would_be_seen(where, monkeypatch):
    monkeypatch.setattr(emulate_module, "_rewritten", lambda value, where, unit: value)
    assert not is_rounded(emulate(WHERE[where], "mxu"))


def test_the_condition_of_a_loop_is_rounded_too():
    a = np.array([[1 + 2.0**-9]], np.float32)  # rounds to 1 at seven bits

    def steps(a):
        return lax.while_loop(lambda n: ((a @ a)[0, 0] > 1) & (n < 3), lambda n: n + 1, 0)

    assert steps(a) == 3
    assert emulate(steps, "mxu")(a) == 0


# ------------------------------------------------------------------------ gradients


def gradients(fn):
    """(cotangent, a, b) -> (da, db)."""
    return lambda g, a, b: jax.vjp(fn, a, b)[1](g)


GRADIENT_ROWS = ["jit", "checkpoint", "cond", "custom_vjp", "custom_jvp"]


@pytest.mark.parametrize("where", GRADIENT_ROWS)
def test_the_products_of_a_gradient_are_rounded(where):
    a, b = operands()
    g = np.random.default_rng(1).standard_normal((T, H)).astype(np.float32)
    da, db = emulate(gradients(WHERE[where]), "mxu")(g, a, b)
    want_da, want_db = rounded(g, 7) @ rounded(b.T, 7), rounded(a.T, 7) @ rounded(g, 7)
    assert excess(da, want_da, accumulation_bound(g, b.T)) <= 1
    assert excess(db, want_db, accumulation_bound(a.T, g)) <= 1
    exact_da, _ = gradients(WHERE[where])(g, a, b)
    assert excess(exact_da, want_da, accumulation_bound(g, b.T)) > 1


def test_differentiating_from_outside_is_refused():
    a, b = operands()
    with pytest.raises(TypeError, match="emulate the derivative"):
        jax.grad(lambda a: emulate(product, "mxu")(a, b).sum())(a)


# ------------------------------------------------------------------- everything else


def test_convolutions_are_rounded():
    rng = np.random.default_rng(0)
    x, kernel = (rng.standard_normal(s).astype(np.float32) for s in ((1, 1, D), (1, 1, 3)))

    def correlate(x, kernel):
        return lax.conv_general_dilated(x, kernel, window_strides=(1,), padding="VALID")

    want = np.correlate(rounded(x[0, 0], 7), rounded(kernel[0, 0], 7))
    bound = 3 * U32 * np.correlate(np.abs(x[0, 0]), np.abs(kernel[0, 0]))
    assert excess(emulate(correlate, "mxu")(x, kernel)[0, 0], want, bound) <= 1
    assert excess(correlate(x, kernel)[0, 0], want, bound) > 1


def test_nothing_but_products_changes():
    a, _ = operands()
    fn = jax.jit(lambda a: jax.nn.softmax(jnp.tanh(a) * 3, axis=-1).sum(0))
    assert np.array_equal(emulate(fn, "mxu")(a), fn(a))


def test_the_signature_is_kept():
    a, b = operands()

    def scaled(pair, *, scale):
        """Its own words."""
        return {"out": (pair["a"] @ pair["b"]) * scale, "scale": scale}

    got = emulate(scaled, "mxu")({"a": a, "b": b}, scale=jnp.float32(2))
    assert set(got) == {"out", "scale"}
    assert np.array_equal(got["out"], 2 * emulate(product, "mxu")(a, b))
    assert emulate(scaled, "mxu").__doc__ == "Its own words."


def increment_kernel(a):
    from jax.experimental import pallas as pl

    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...] @ x_ref[...]

    return pl.pallas_call(body, out_shape=a, interpret=True)(a)


REFUSALS = {
    "pallas": (increment_kernel, "products of pallas_call"),
    "ragged": (lambda a: lax.ragged_dot(a, a[None], jnp.array([4])), "ragged_dot_general"),
    "complex": (lambda a: (a + 1j) @ a, "complex"),
    "algorithm": (lambda a: jnp.matmul(a, a, precision="TF32_TF32_F32"), "mxu has no TF32"),
}


@pytest.mark.parametrize(("fn", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_it_cannot_see_into_is_refused(fn, message):
    with pytest.raises(NotImplementedError, match=message):
        emulate(fn, "mxu")(jnp.ones((4, 4)))


def test_an_unknown_unit_is_refused_by_name():
    with pytest.raises(ValueError, match="unit: expected one of mxu, tf32, got 'ane'"):
        emulate(product, "ane")
    assert set(UNITS) == set(BITS)
