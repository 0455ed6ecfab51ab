"""cuDNN, on hosts that have none: what it is asked, checked by jax.nn's plain twin; what is
refused; and that it is lowered to. Nothing here has run on a GPU."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from helpers.attention import attention_definition as definition
from helpers.attention.kernel_refusals import refusals
from jax_attn.attention import Dropout, Mask, dot_product_attention, explain_kernel
from jax_attn.attention.call import ExtraKeys, checked_call
from jax_attn.attention.kernels import cudnn

B, T, S, N, K, H = 3, 6, 10, 6, 3, 8


@pytest.fixture
def present(monkeypatch):
    """As where jax has found cuDNN; its checks and its lowering need no more."""
    found = SimpleNamespace(cudnn_get_version=lambda: 91000)
    monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", found)
    cudnn._objection.cache_clear()
    yield
    cudnn._objection.cache_clear()


def test_where_it_is_not_jax_says_so():
    assert refusals(cudnn) == ["jax does not support it here: cuDNN is not detected"]


# --- what it is asked ----------------------------------------------------------------------

rng = np.random.default_rng(4)
ALLOWED = rng.random((B, 1, T, S)) < 0.5
ALLOWED[0, :, 2] = False
BIAS = rng.standard_normal((N, T, S)).astype(np.float32)
BIAS[1, 3] = -np.inf
BIAS[2, 4, :7] = -np.inf
# mask and bias; each but the first has rows that may attend to nothing, or to one key.
ROWS = {
    "open": (None, None),
    "causal": (Mask.causal(), None),
    "window": (Mask.window(2, 0), None),
    "lengths, one of them 0": (Mask.lengths([4, 0, 13]) & Mask.causal(), None),
    "array": (Mask.array(ALLOWED), None),
    "array, lengths, band": (Mask.array(ALLOWED) & Mask.lengths([4, 0, 9]) & Mask.causal(), None),
    "bias": (None, BIAS),
    "bias and array": (Mask.array(ALLOWED), BIAS),
}


def draws():
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H)
    return [np.random.default_rng(7).standard_normal(s).astype(np.float32) for s in shapes]


def errors(name, gradients=True) -> list[float]:
    """The worst error of output and gradients, in units of their budgets, by jax.nn's twin."""
    mask, bias = ROWS[name]
    *arrays, cotangent = draws()

    @jax.jit
    def run(cotangent, *arrays):
        def attend(q, k, v, bias):
            call = checked_call("attend", q, k, v, mask, bias=bias, scale=0.3)
            return cudnn.attention(call, implementation="xla")

        if not gradients:
            return (attend(*arrays),)
        out, pull = jax.vjp(attend, *arrays)
        return out, *(g for g in pull(cotangent) if g is not None)

    given = {"bias": bias, "scale": 0.3}
    given["allowed"] = None if mask is None else np.asarray(mask.materialize(T, S))
    want, _ = definition.attend(*arrays, **given)
    budget, _ = definition.forward_budget("float32", *arrays, **given)
    grads = definition.gradients(cotangent, *arrays, **given)
    budgets = definition.gradient_budget("float32", cotangent, *arrays, **given)
    # The definition's bias gradient is of every score: ours is summed over the batch.
    *qkv, d_bias = zip(grads, budgets, strict=True)
    wanted = [(want, budget), *qkv, tuple(x.sum(axis=0) for x in d_bias)]
    found = run(cotangent, *arrays, bias)
    return [definition.worst(got, *pair) for got, pair in zip(found, wanted, strict=False)]


@pytest.mark.parametrize("name", ROWS)
def test_it_is_objection_for_attention(name):
    found = errors(name)
    assert len(found) == (4 if ROWS[name][1] is None else 5)
    assert max(found) <= 1


def test_that_comparison_sees_empty_rows_left_as_they_are(monkeypatch):
    monkeypatch.setattr(cudnn, "_zeroed", lambda out, empty: out)
    assert not max(errors("lengths, one of them 0", gradients=False)) <= 1


def test_that_comparison_sees_a_window_off_by_one(monkeypatch):
    asked = jax.nn.dot_product_attention

    def mistaken(*args, local_window_size, **options):
        left, right = local_window_size
        return asked(*args, local_window_size=(left + 1, right), **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", mistaken)
    assert not max(errors("window", gradients=False)) <= 1


# --- what is refused ------------------------------------------------------------------------

ANY = np.ones((130, 130), bool)
REFUSED = {
    "float32": ({"dtype": "float32"}, "it takes float16 and bfloat16, not float32"),
    "precision": ({"precision": "highest"}, "it multiplies the weights in the inputs' dtype"),
    "dropout": ({"dropout": Dropout(0.5, keep=ANY)}, "its dropout differs"),
    "empty batch": ({"B": 0}, "there is nothing to compute"),
    "odd heads": ({"H": 12}, "H must be a multiple of 8, here 12"),
    "wide heads": ({"H": 136}, "H may be 128 at most, 256 from Hopper on, here 136"),
    "other values": ({"Hv": 16}, "Hv must be H, here 16 and 8"),
    "softcap": ({"softcap": 5.0}, "it has no softcap"),
    "sinks": ({"extra": ExtraKeys(sinks=jnp.ones(2))}, "it supports no bias_k, zero key or"),
    "segments": (
        {"mask": Mask.segments(np.ones((2, 130), int), np.ones((2, 130), int))},
        "it takes no segments",
    ),
    "traced band": ({"mask": Mask.causal(np.array([1, 2]))}, "it takes no band that differs"),
    "offset": ({"mask": Mask.causal(-1)}, "a band must end at the query itself"),
    "to the right": ({"mask": Mask.window(3, 1)}, "a band must end at the query itself"),
    "band behind": ({"mask": Mask(lo=1, hi=0)}, "a band must hold the query itself"),
    "window and lengths": (
        {"mask": Mask.window(3, 0) & Mask.lengths(5)},
        "a window and lengths together may hide all keys",
    ),
    "odd sizes": ({"T": 131, "mask": np.ones((131, 131), bool)}, "T and S must be even, here 131"),
    "bias's dtype": (
        {"bias": jnp.ones((130, 130))},
        "it adds a bias in the query's dtype, not in float32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("present")
def test_each_reason_is_told(name):
    options, why = REFUSED[name]
    told = refusals(cudnn, **options)
    assert any(why in reason for reason in told)
    # A band that lies wholly ahead leaves the last queries nothing, too.
    assert len(told) == (2 if name == "band behind" else 1)


@pytest.mark.usefixtures("present")
def test_a_window_whose_last_queries_see_nothing_is_refused():
    q = jax.ShapeDtypeStruct((1, 256, 2, 8), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((1, 200, 2, 8), jnp.bfloat16)
    for left, refused in ((55, True), (56, False)):
        (cuda, _) = explain_kernel(q, kv, kv, Mask.window(left, 0)).elsewhere
        assert ("a window's last queries would see no key" in str(cuda)) == refused
        assert (cuda.chosen == "cudnn") != refused


@pytest.mark.usefixtures("present")
def test_under_vmap_it_is_refused():
    x = jnp.ones((2, 1, 256, 2, 8), jnp.bfloat16)
    told = []

    def loss(x):
        told.append(explain_kernel(x, x, x).elsewhere[0].chosen)
        return x.sum()

    for fn, chosen in ((loss, "dense"), (jax.grad(loss), "dense")):
        jax.vmap(fn)(x)
        assert told.pop() == chosen
    loss(x[0])
    assert told == ["cudnn"]


# --- what it is lowered to ------------------------------------------------------------------

x = jax.ShapeDtypeStruct((2, 256, 6, 8), jnp.bfloat16)
KV = jax.ShapeDtypeStruct((2, 256, 3, 8), jnp.bfloat16)


def kernels(fn, *shapes, platform="cuda") -> set[str]:
    """The custom calls of a program that is lowered for the platform."""
    lowered = jax.jit(lambda *args: fn(*args)).trace(*shapes).lower(lowering_platforms=(platform,))
    return set(re.findall(r"custom_call @(__cudnn\$\w+)", lowered.as_text()))


def attend(q, kv):
    return dot_product_attention(q, kv, kv, Mask.lengths(jnp.array([200, 3])), is_causal=True)


def gradient(q, kv):
    return jax.grad(lambda q: attend(q, kv).astype(jnp.float32).sum())(q)


@pytest.mark.slow
@pytest.mark.usefixtures("present")
def test_where_it_is_found_programs_for_cuda_carry_it():
    assert kernels(attend, x, KV) == {"__cudnn$fmhaSoftmax"}
    backward = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    assert kernels(gradient, x, KV) == backward
    for platform in ("cpu", "tpu"):
        assert kernels(gradient, x, KV, platform=platform) == set()


def test_where_it_is_not_they_carry_dense_and_explain_says_so():
    assert kernels(attend, x, KV) == set()
    (cuda, _) = explain_kernel(x, KV, KV, is_causal=True).elsewhere
    assert cuda.chosen == "dense"
    assert "not cudnn: jax does not support it here: cuDNN is not detected" in str(cuda)
