"""Attention where little is left: empty rows, narrow numbers, transforms; by each kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.attention import attention_definition as definition
from helpers.attention.attention_cases import (
    CASES,
    DTYPES,
    HV,
    KV_SEGMENTS,
    LENGTHS,
    OFFSETS,
    Q_SEGMENTS,
    B,
    H,
    N,
    S,
    T,
    by_each_kernel,
    cols,
    dot_product_attention,
    draw,
    one_kernel,
    per_row,
    rows,
    value_and_gradients,
)
from helpers.jaxprs import equations
from jax_attn.attention import Mask, attention_weights, explain_kernel

pytestmark = [by_each_kernel, pytest.mark.filterwarnings("error")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("empty rows", "float16"), ("bias of -inf", "float32")]
)
def test_an_empty_row_is_exactly_zero_and_sends_no_gradient(name, dtype):
    arguments, wanted = CASES[name]
    *arrays, cotangent = draw(7, dtype)
    _, weights = definition.attend(*arrays, **wanted)
    empty_BTN = ~weights.any(axis=-1).transpose(0, 2, 1)
    assert empty_BTN.any()
    assert not empty_BTN.all()
    run = jax.jit(lambda *arrays: value_and_gradients(*arrays, **arguments))
    out, dq, dk, dv, _ = run(cotangent, *arrays)
    assert not np.asarray(out)[empty_BTN].any()
    assert not np.asarray(dq)[empty_BTN].any()
    other = np.where(empty_BTN[..., None], np.asarray(9, dtype), cotangent)
    _, _, dk_other, dv_other, _ = run(other, *arrays)
    assert np.array_equal(dk, dk_other)
    assert np.array_equal(dv, dv_other)


@pytest.mark.slow
def test_nothing_is_nan_where_every_row_is_empty():
    *arrays, cotangent = draw(8)
    hidden = np.zeros((T, S), bool)
    run = jax.jit(lambda *given: value_and_gradients(*given, mask=hidden))
    for got in run(cotangent, *arrays):
        assert not np.asarray(got).any()


@pytest.mark.slow
def test_second_derivatives_pass_empty_rows():
    q, k, v, _ = draw(9)

    def total(q):
        return dot_product_attention(q, k, v, Mask.causal(-2)).sum()

    curvature = jax.jit(jax.grad(lambda q: (jax.grad(total)(q) ** 2).sum()))
    assert np.isfinite(curvature(q)).all()


def test_scores_too_large_for_float16_do_not_overflow():
    q, k, v, _ = draw(10, "float16")
    q, k = q * np.float16(100), k * np.float16(100)
    out, _ = definition.attend(q, k, v)
    budget, _ = definition.forward_budget("float16", q, k, v)
    run = jax.jit(lambda *arrays: dot_product_attention(*arrays))  # by name, the other kernel's
    assert definition.worst(run(q, k, v), out, budget) <= 1


TRANSFORMS = {
    "jit": jax.jit,
    "remat": lambda f: jax.jit(jax.checkpoint(f)),
    "vmap": lambda f: (
        lambda q, k, v, m: jax.jit(jax.vmap(f))(
            *(x[None] for x in (q, k, v)), jax.tree.map(lambda x: jnp.asarray(x)[None], m)
        )[0]
    ),
    "scan": lambda f: (
        lambda q, k, v, m: jax.lax.scan(lambda c, _: (c, f(q, k, v, m)), 0, length=1)[1][0]
    ),
    "export": lambda f: (
        lambda *a: jax.export.export(jax.jit(f), platforms=("cpu", "cuda", "tpu"))(*a).call(*a)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_under_transforms_with_the_mask_as_an_argument(transform):
    q, k, v, _ = map(jnp.asarray, draw(12))
    mask = Mask.causal(OFFSETS) & Mask.lengths(LENGTHS) & Mask.segments(Q_SEGMENTS, KV_SEGMENTS)
    allowed = (cols <= rows + per_row(OFFSETS)) & (cols < per_row(LENGTHS))
    allowed = allowed & CASES["segments"][1]["allowed"]

    def attend(q, k, v, mask):
        return dot_product_attention(q, k, v, mask)

    if transform == "export":
        # An exported function takes arrays only.
        inner, leaves = attend, jax.tree.leaves(mask)
        structure = jax.tree.structure(mask)
        leaves = [jnp.asarray(x) for x in leaves]
        got = TRANSFORMS[transform](
            lambda q, k, v, *m: inner(q, k, v, jax.tree.unflatten(structure, m))
        )(q, k, v, *leaves)
    else:
        got = TRANSFORMS[transform](attend)(q, k, v, mask)
    out, _ = definition.attend(q, k, v, allowed=allowed)
    budget, _ = definition.forward_budget("float32", q, k, v, allowed=allowed)
    assert definition.worst(got, out, budget) <= 1


@one_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_come_in_the_query_dtype_and_before_dropout(dtype):
    with jax.enable_x64(dtype == "float64"):
        q, k, _, _ = draw(13, dtype)
        weights = attention_weights(q, k)
        assert weights.dtype == dtype
        slack = S * definition.ROUNDOFF[dtype]
        assert np.abs(np.asarray(weights, np.float64).sum(-1) - 1).max() <= slack


def test_kv_is_never_repeated(kernel):
    q, k, v, _ = draw(14, kv_heads=1)
    found = list(equations(jax.make_jaxpr(lambda *x: dot_product_attention(*x))(q, k, v).jaxpr))
    shapes = {variable.aval.shape for equation in found for variable in equation.outvars}
    loops = {"scan", "while"} & {equation.primitive.name for equation in found}
    assert bool(loops) == (kernel == "blocked")
    assert not {(B, S, N, H), (B, S, N, HV), (B, N, S, H), (B, N, S, HV)} & shapes


def test_precision_reaches_both_products():
    q, k, v, _ = draw(14)
    for precision in (None, jax.lax.Precision.HIGHEST):
        jaxpr = jax.make_jaxpr(
            lambda *x, precision=precision: dot_product_attention(*x, precision=precision)
        )(q, k, v)
        products = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
        want = None if precision is None else (precision, precision)
        assert {e.params["precision"] for e in products} == {want}
        assert len(products) >= 2


@one_kernel
class TestExplain:
    def test_says_what_runs_and_runs_nothing(self):
        abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in draw(0)[:3]]
        lengths = Mask.lengths(jax.ShapeDtypeStruct((B,), jnp.int32))
        mask = lengths & Mask.causal() & Mask.array(jax.ShapeDtypeStruct((T, S), jnp.bool))
        explanation = explain_kernel(
            *abstract, mask, bias=jax.ShapeDtypeStruct((1, S), jnp.float32)
        )
        assert explanation.chosen == "dense"
        assert str(explanation) == repr(explanation)
        assert str(explanation).startswith("dense runs: ")
