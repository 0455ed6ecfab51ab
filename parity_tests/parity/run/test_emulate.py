"""Emulated matrix units: every product rounded, wherever it stands, and nothing else."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from jax_attn.parity.run import emulate as emulate_module
from jax_attn.parity.run.emulate import UNITS, emulate

T, D, H = 5, 13, 7  # (T, D) @ (D, H)
U32 = 2.0**-24


def operands(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((T, D)).astype(dtype), rng.standard_normal((D, H)).astype(dtype)


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """float64: x to the nearest with `bits` explicit mantissa bits, ties to even."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.rint(np.ldexp(mantissa, bits + 1)), exponent - bits - 1)


def accumulation_bound(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Products of numbers of at most 12 significant bits are exact in float32; adding D of
    them errs by at most D·u of their absolute sum, in whatever order (Higham, §4.2)."""
    return D * U32 * (np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64))


def excess(got, want, bound) -> float:
    """The largest error as a multiple of its bound: at most 1 is as it should be."""
    return float(np.max(np.abs(np.asarray(got, np.float64) - want) / bound))


def product(a, b):
    return jnp.matmul(a, b)


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


# ------------------------------------------------------------ precision, as asked for

# With p parts of 8 bits the split leaves 2⁻⁸ᵖ of an operand. Each product then lacks the two
# remainders, and the products of parts that were not run: p−1 of them, each 2⁻⁸ᵖ or less.
DROPPED = {1: 2 * 2.0**-8, 2: 3 * 2.0**-16, 3: 4 * 2.0**-24}

PRECISIONS = {
    "none": (None, 1),
    "default": ("default", 1),
    "high": ("high", 2),
    "highest": ("highest", 3),
    "float32": ("float32", 3),
    "one pass": ("BF16_BF16_F32", 1),
    "three passes": ("BF16_BF16_F32_X3", 2),
    "six passes": ("BF16_BF16_F32_X6", 3),
}


def error_in_parts(got, parts: int) -> float:
    a, b = operands()
    magnitude = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    # 3·2⁻²⁴: up to six partial sums, three of them of no consequence, are added in float32.
    bound = (DROPPED[parts] * (1 + 2.0**-7) + (D + 3) * U32) * magnitude
    return excess(got, a.astype(np.float64) @ b.astype(np.float64), bound)


@pytest.mark.parametrize(("precision", "parts"), PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("how", ["argument", "context"])
def test_mxu_heeds_precision(precision, parts, how):
    a, b = operands()
    if how == "argument":
        got = emulate(lambda a, b: jnp.matmul(a, b, precision=precision), "mxu")(a, b)
    else:
        with jax.default_matmul_precision(precision):
            got = emulate(product, "mxu")(a, b)
    assert error_in_parts(got, parts) <= 1
    assert parts == 3 or error_in_parts(got, parts + 1) > 1, "more accurate than the unit is"


def test_one_function_follows_the_context_from_call_to_call():
    a, b = operands()
    fn = emulate(product, "mxu")
    first = fn(a, b)
    with jax.default_matmul_precision("highest"):
        assert error_in_parts(fn(a, b), 3) <= 1
    assert np.array_equal(fn(a, b), first)
    assert error_in_parts(first, 2) > 1


TF32_BITS = {"default": 10, "high": 10, "TF32_TF32_F32": 10, "BF16_BF16_F32": 7}


@pytest.mark.parametrize(("precision", "bits"), TF32_BITS.items(), ids=TF32_BITS)
def test_tf32_rounds_up_to_high(precision, bits):
    a, b = operands()
    got = emulate(lambda a, b: jnp.matmul(a, b, precision=precision), "tf32")(a, b)
    assert excess(got, rounded(a, bits) @ rounded(b, bits), accumulation_bound(a, b)) <= 1


@pytest.mark.parametrize("precision", ["highest", "F32_F32_F32", ("default", "highest")])
def test_tf32_leaves_float32_alone_beyond_high(precision):
    a, b = operands()
    got = emulate(lambda a, b: jnp.matmul(a, b, precision=precision), "tf32")(a, b)
    exact, bound = a.astype(np.float64) @ b.astype(np.float64), 2 * accumulation_bound(a, b)
    assert excess(got, exact, bound) <= 1  # twice: here the products round as well
    assert excess(rounded(a, 10) @ rounded(b, 10), exact, bound) > 1


def test_mxu_splits_each_operand_by_its_own_precision():
    a, b = operands()
    got = emulate(lambda a, b: jnp.matmul(a, b, precision=("default", "highest")), "mxu")(a, b)
    # b's three parts give it back to 2⁻²⁴; each of the three products is exact.
    bound = 4 * accumulation_bound(a, b)
    assert excess(got, rounded(a, 7) @ b.astype(np.float64), bound) <= 1
    assert excess(got, rounded(a, 7) @ rounded(b, 7), bound) > 1


# ---------------------------------------------------------------------------- dtypes


def test_mxu_has_no_float16_pass():
    a, b = operands("float16")
    for precision, bits in (("default", 7), ("high", 10)):
        fn = emulate(
            lambda a, b, p=precision: jnp.matmul(
                a, b, precision=p, preferred_element_type=jnp.float32
            ),
            "mxu",
        )
        want = rounded(a, bits) @ rounded(b, bits)
        # at HIGH two parts of 8 bits hold all 11; the product of the two small parts,
        # 2⁻¹⁶ of the whole, is the one that is not run
        bound = accumulation_bound(a, b) * (1 if bits == 7 else 4 + 2.0**-16 / (D * U32))
        assert excess(fn(a, b), want, bound) <= 1
        assert excess(rounded(a, 17 - bits) @ rounded(b, 17 - bits), want, bound) > 1


@pytest.mark.parametrize(
    ("unit", "dtype"), [("mxu", "bfloat16"), ("tf32", "bfloat16"), ("tf32", "float16")]
)
def test_what_the_unit_holds_exactly_is_not_rounded(unit, dtype):
    a, b = operands(dtype)
    got = emulate(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32), unit)(a, b)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert excess(got, exact, accumulation_bound(a, b)) <= 1


def test_the_result_keeps_its_dtype_and_is_rounded_once():
    a, b = operands("bfloat16")
    got = emulate(product, "mxu")(a, b)
    assert got.dtype == jnp.bfloat16
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bound = accumulation_bound(a, b) * (1 + 2.0**-8) + 2.0**-8 * np.abs(exact)
    assert excess(got, exact, bound) <= 1


def test_float64_and_integers_are_left_alone():
    a, b = operands("float64")
    with jax.enable_x64(True):
        assert np.array_equal(emulate(product, "mxu")(a, b), jax.jit(product)(a, b))
    integers = np.arange(T * D).reshape(T, D) + 1000
    assert np.array_equal(emulate(product, "mxu")(integers, integers.T), integers @ integers.T)


def test_infinities_stay_infinities():
    a, b = operands()
    a[0, 0] = math.inf
    got = emulate(lambda a, b: jnp.matmul(a, b, precision="high"), "mxu")(a, np.abs(b))
    assert np.isposinf(got[0]).all()
    assert np.isfinite(got[1:]).all()


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
