"""bias_k and bias_v, add_zero_attn and sinks: keys that every query sees, beside the sequence's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.attention import attention_definition as definition
from helpers.attention.attention_cases import (
    BIAS_HOLES,
    DTYPES,
    HV,
    LENGTHS,
    B,
    H,
    K,
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
)
from helpers.attention.extra_keys import folded, written_out
from jax_attn import attention
from jax_attn.attention import Dropout, KVCache, Mask, attend_with_cache, attention_weights
from jax_attn.attention.kernels import cached
from jax_attn.attention.kv_cache import PageSizes

pytestmark = [by_each_kernel, pytest.mark.filterwarnings("error")]

RNG = np.random.default_rng(30)
ALL = {
    "bias_k": RNG.standard_normal((K, H)).astype(np.float32),
    "bias_v": RNG.standard_normal((K, HV)).astype(np.float32),
    "add_zero_attn": True,
    "sinks": RNG.standard_normal(N).astype(np.float32),
}
KEEP = RNG.random((B, N, T, S + 2)) < 0.7
EMPTY = cols <= rows - 2


def only(*names):
    return {name: ALL[name] for name in names}


# name: the extra keys; what else the function is told; what of it the definition is told.
CASES = {
    "bias_kv": (only("bias_k", "bias_v"), {}, {}),
    "zero": (only("add_zero_attn"), {"mask": EMPTY}, {"allowed": EMPTY}),
    "sinks": (only("sinks"), {"mask": Mask.causal(-2)}, {"allowed": EMPTY}),
    "all": (
        ALL,
        {
            "mask": Mask.lengths(LENGTHS),
            "bias": BIAS_HOLES,
            "scale": 0.5,
            "softcap": 1.5,
            "dropout": Dropout(0.3, keep=KEEP),
        },
        {
            "allowed": cols < per_row(LENGTHS),
            "bias": BIAS_HOLES,
            "scale": 0.5,
            "softcap": 1.5,
            "keep": KEEP,
            "rate": 0.3,
        },
    ),
}


def value_and_gradients(cotangent, arrays, extra, told, plant):
    """The output; gradients of query, key, value, bias, and of the extra keys or None."""
    floats = {name: x for name, x in extra.items() if name != "add_zero_attn"}
    zero = {name: x for name, x in extra.items() if name == "add_zero_attn"}

    def call(arrays, bias, floats):
        bias = bias + jnp.asarray(told.get("bias", np.float32(0))).astype(bias.dtype)
        return dot_product_attention(*arrays, **told | {"bias": bias}, **plant(floats | zero))

    wide = jnp.float64 if arrays[0].dtype == "float64" else jnp.float32
    out, pull = jax.vjp(call, arrays, jnp.zeros((B, N, T, S), wide), floats)
    d_arrays, d_bias, d_floats = pull(cotangent)
    return out, *d_arrays, d_bias, *map(d_floats.get, ("bias_k", "bias_v", "sinks"))


def worst_errors(name, dtype="float32", plant=dict):
    """Of the output and each gradient, in units of its budget."""
    extra, told, wanted = CASES[name]
    *arrays, cotangent = draw(21, dtype)
    extra = {k: x if k == "add_zero_attn" else x.astype(dtype) for k, x in extra.items()}
    run = jax.jit(lambda d_out, arrays: value_and_gradients(d_out, arrays, extra, told, plant))
    found = run(jnp.asarray(cotangent), tuple(map(jnp.asarray, arrays)))
    arrays, wanted = written_out(*arrays, **extra, **wanted)
    out, _ = definition.attend(*arrays, **wanted)
    budget, _ = definition.forward_budget(dtype, *arrays, **wanted)
    grads = folded(*definition.gradients(cotangent, *arrays, **wanted))
    budgets = folded(*definition.gradient_budget(dtype, cotangent, *arrays, **wanted))
    rows = zip(found, (out, *grads), (budget, *budgets), strict=True)
    return [definition.worst(*row) for row in rows if row[0] is not None]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_they_are_keys_that_are_written_out(name):
    assert max(worst_errors(name)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("dense", dtype) for dtype in DTYPES if dtype != "float32"] + [("blocked", "bfloat16")],
    indirect=["kernel"],
)
def test_in_every_dtype(dtype):
    with jax.enable_x64(dtype == "float64"):
        assert max(worst_errors("all", dtype)) <= 1


def replaced(name, by):
    return lambda extra: extra | {name: by(extra[name])}


# mistake: the case that sees it, what is told in place of its extra keys.
MISTAKES = {
    "bias_k scaled before": ("bias_kv", replaced("bias_k", lambda k: 0.5 * k)),
    "bias_v left out": ("all", replaced("bias_v", lambda v: 0 * v)),
    "heads rolled": ("all", replaced("bias_v", lambda v: jnp.roll(v, 1, axis=0))),
    "no zero key": ("zero", lambda extra: {}),
    "sinks scaled": ("sinks", replaced("sinks", lambda s: 0.5 * s)),
    "one sink for all heads": ("all", replaced("sinks", lambda s: s[:1].repeat(N))),
    **{
        f"no gradient of {name}": ("all", replaced(name, jax.lax.stop_gradient))
        for name in ("bias_k", "bias_v", "sinks")
    },
}


@pytest.mark.slow
@one_kernel
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_sees_a_mistake(mistake):
    name, plant = MISTAKES[mistake]
    assert max(worst_errors(name, plant=plant)) > 10


# --- laws ---------------------------------------------------------------------------------------


def within_budget(one, other, arrays, wanted=None, **extra):
    arrays, wanted = written_out(*arrays, **extra, **(wanted or {}))
    budget, _ = definition.forward_budget("float32", *arrays, **wanted)
    return definition.worst(one, np.asarray(other, np.float64), 2 * budget) <= 1


@pytest.mark.slow
@one_kernel
def test_a_sink_of_minus_infinity_changes_nothing():
    *arrays, _ = draw(22)
    nothing = np.full(N, -np.inf, np.float32)
    for told, wanted in (({}, {}), ({"mask": Mask.causal(-2)}, {"allowed": EMPTY})):
        with_sinks = dot_product_attention(*arrays, sinks=nothing, **told)
        without = dot_product_attention(*arrays, **told)
        assert within_budget(with_sinks, without, arrays, wanted)


@pytest.mark.slow
def test_dropout_that_is_drawn_has_a_column_for_each():
    *arrays, _ = draw(24)
    dropout = Dropout(0.4, key=jax.random.key(3))
    keep = np.asarray(dropout.apply(jnp.ones((B, N, T, S + 2)))) > 0
    assert not keep[..., S].all()
    drawn = dot_product_attention(*arrays, dropout=dropout, **ALL)
    handed_in = dot_product_attention(*arrays, dropout=Dropout(0.4, keep=keep), **ALL)
    assert within_budget(drawn, handed_in, arrays, {"keep": keep, "rate": 0.4}, **ALL)
    all_dropped = dot_product_attention(*arrays, dropout=Dropout(1.0, keep=keep), **ALL)
    assert not np.asarray(all_dropped).any()


@pytest.mark.slow
@one_kernel
def test_weights_have_a_column_for_each_but_the_sinks():
    q, k, v, _ = draw(25)
    extra = {name: x for name, x in ALL.items() if name != "bias_v"}
    got = attention_weights(q, k, Mask.causal(-2), **extra)
    assert got.shape == (B, N, T, S + 2)
    arrays, wanted = written_out(q, k, v, allowed=EMPTY, **ALL)
    _, weights = definition.attend(*arrays, **wanted)
    _, budget = definition.forward_budget("float32", *arrays, **wanted)
    assert definition.worst(got, weights[..., : S + 2], budget[..., : S + 2]) <= 1


@pytest.mark.slow
@one_kernel
def test_where_the_compiler_settles_the_kernel_they_come_along():
    """Blocked on a CPU, dense elsewhere: one program with both."""
    rng = np.random.default_rng(26)
    q, k, v = (rng.standard_normal((1, 163, heads, 4)).astype(np.float32) for heads in (2, 1, 1))
    extra = {"bias_k": k[0, 0], "bias_v": v[0, 0], "sinks": q[0, 0, :, 0]}
    assert attention.explain_kernel(q, k, v, **extra).chosen == "blocked"

    def gradients(implementation):
        def total(arrays, extra):
            options = {"add_zero_attn": True, "implementation": implementation}
            return attention.dot_product_attention(*arrays, **options, **extra).sum()

        return jax.tree.leaves(jax.jit(jax.grad(total, argnums=(0, 1)))((q, k, v), extra))

    for chosen, dense in zip(gradients(None), gradients("dense"), strict=True):
        assert np.abs(chosen - dense).max() <= 1e-5 * np.abs(dense).max()


# Few tokens over several pages; as many as the blocked kernel is for, once its limit is lowered.
@pytest.mark.slow
@one_kernel
@pytest.mark.parametrize("few_scores", [cached.FEW_SCORES, 4])
def test_a_cache_attends_to_them_in_every_step(monkeypatch, few_scores):
    monkeypatch.setattr(cached, "FEW_SCORES", few_scores)
    q, k, v = (np.concatenate(2 * [x], axis=1)[:, :T] for x in draw(27)[:3])
    cache = KVCache.empty(
        B, T, num_kv_heads=K, head_dim=H, value_dim=HV, page_sizes=PageSizes(first=2, query_tile=2)
    )
    outs = []
    for start, end in ((0, 3), (3, 4), (4, 5)):
        piece = (x[:, start:end] for x in (q, k, v))
        out, cache = attend_with_cache(*piece, cache, softcap=1.5, **ALL)
        outs.append(out)
    causal = np.tri(T, dtype=bool)
    arrays, wanted = written_out(q, k, v, allowed=causal, softcap=1.5, **ALL)
    budget, _ = definition.forward_budget("float32", *arrays, **wanted)
    out, _ = definition.attend(*arrays, **wanted)
    assert definition.worst(np.concatenate(outs, axis=1), out, budget) <= 1
