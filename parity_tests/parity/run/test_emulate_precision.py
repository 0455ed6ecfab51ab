"""Emulated matrix units: precision is heeded, and each dtype rounded only where it has to be."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.parity.rounded_products import (
    U32,
    D,
    T,
    accumulation_bound,
    excess,
    operands,
    product,
    rounded,
)
from jax_attn.parity.run.emulate import emulate

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
