"""What bad arguments get: one error that names each of them, what was expected and what came."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_attn.attention import (
    ArgumentError,
    Dropout,
    Mask,
    attention_weights,
    dot_product_attention,
    explain_kernel,
)

pytestmark = pytest.mark.filterwarnings("error")

B, T, S, N, K, H, HV = 2, 5, 7, 6, 3, 11, 13
GOOD = {
    "query": np.ones((B, T, N, H), np.float32),
    "key": np.ones((B, S, K, H), np.float32),
    "value": np.ones((B, S, K, HV), np.float32),
}


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


# name: what is changed in a good call; what the error says.
BAD = {
    "T of 0": ({"query": ones(B, 0, N, H)}, r"query: expected T ≥ 1, got float32\[2, 0, 6, 11\]"),
    "S of 0": (
        {"key": ones(B, 0, K, H), "value": ones(B, 0, K, HV)},
        r"(?s)key: expected S ≥ 1.*value: expected S ≥ 1",
    ),
    "no kv heads": ({"key": ones(B, S, 0, H)}, "key: expected K ≥ 1"),
    "rank 3": ({"query": ones(T, N, H)}, r"query: expected rank 4 \(B, T, N, H\), got float32"),
    "a list": ({"key": [1.0]}, "key: expected a NumPy or JAX array, got list"),
    "value missing": ({"value": None}, r"value: expected an array \(B, S, K, Hv\), got None"),
    "other batch": ({"query": ones(3, T, N, H)}, "expected the same batch B"),
    "other lengths": ({"value": ones(B, S + 1, K, HV)}, "key, value: expected the same length S"),
    "other kv heads": ({"value": ones(B, S, 1, HV)}, "key, value: .* and heads K"),
    "other head_dim": ({"key": ones(B, S, K, H + 1)}, "query, key: expected the same head_dim H"),
    "heads not by kv heads": (
        {"query": ones(B, T, 5, H)},
        "expected query heads N a multiple of key/value heads K",
    ),
    "integers": ({"query": ones(B, T, N, H, dtype=int)}, "query: expected float32.*got dtype int"),
    "complex": ({"key": ones(B, S, K, H, dtype=np.complex64)}, "key: .*got dtype complex64"),
    "mixed dtypes": (
        {"key": ones(B, S, K, H, dtype=np.float16)},
        r"query, key, value: expected one dtype, got query float32.*key float16",
    ),
    "float64 without x64": (
        {"value": ones(B, S, K, HV, dtype=np.float64)},
        r'value: float64 needs x64.*jax.config.update\("jax_enable_x64", True\)',
    ),
    "float64 bias without x64": ({"bias": ones(T, S, dtype=np.float64)}, "bias: float64 needs x64"),
    "a precision that is none": ({"precision": "junk"}, "precision: expected .* got str 'junk'"),
    "a precision without a hash": ({"precision": ["highest"]}, "precision: expected .* got list"),
    "a scale beyond floats": ({"scale": 10**400}, "scale: expected a finite plain number"),
    "boolean bias": ({"bias": ones(T, S, dtype=bool)}, "bias: expected floats.*got bool"),
    "integer bias": (
        {"bias": ones(T, S, dtype=np.int32)},
        "bias: expected float32.*got dtype int32",
    ),
    "bias of another shape": (
        {"bias": ones(T, S + 1)},
        r"bias: expected a shape that broadcasts to \(B, N, T, S\) = \(2, 6, 5, 7\), got",
    ),
    "bias that would widen": ({"bias": ones(1, B, N, T, S)}, "bias: expected a shape that"),
    "float mask": ({"mask": ones(T, S)}, "mask: expected boolean, True = attend.*is bias="),
    "0/1 mask": ({"mask": ones(T, S, dtype=int)}, r"mask: expected boolean.*Mask.from_zero_one"),
    "mask of rank 3": (
        {"mask": ones(B, T, S, dtype=bool)},
        r"mask: .*both as \(B, T, S\) and as \(N, T, S\): make it \[:, None\], \(2, 1, 5, 7\)",
    ),
    "mask of another shape": (
        {"mask": ones(B, 1, 1, S + 1, dtype=bool)},
        r"mask \(array\): expected a shape that broadcasts to \(B, N, T, S\)",
    ),
    "lengths of another batch": ({"mask": Mask.lengths([1, 2, 3])}, r"mask \(lengths\): expected"),
    "a mask of True": ({"mask": True}, "mask: expected a boolean array, got bool"),
    "is_causal of 1": ({"is_causal": 1}, "is_causal: expected a static Python bool, got int 1"),
    "is_causal of None": ({"is_causal": None}, "is_causal: .* got NoneType None"),
    "scale of nan": ({"scale": float("nan")}, "scale: expected a finite plain number"),
    "scale of an array": ({"scale": ones()}, "scale: .*a learned scale multiplies the query"),
    "softcap of 0": ({"softcap": 0.0}, "softcap: expected a finite plain number > 0"),
    "softcap of -1": ({"softcap": -1}, "softcap: expected a finite plain number > 0"),
    "softcap of infinity": ({"softcap": float("inf")}, "softcap: expected a finite"),
    "dropout of a rate": ({"dropout": 0.1}, "dropout: expected a Dropout, got float 0.1"),
    "keep of another shape": (
        {"dropout": Dropout(0.1, keep=ones(T, S + 1, dtype=bool))},
        "dropout.keep: expected a shape that broadcasts",
    ),
    "bias_k alone": ({"bias_k": ones(K, H)}, "bias_v: expected together with bias_k, got None"),
    "bias_v alone": ({"bias_v": ones(K, HV)}, "bias_k: expected together with bias_v, got None"),
    "bias_k per query head": (
        {"bias_k": ones(N, H), "bias_v": ones(K, HV)},
        r"bias_k: expected \(K, H\) = \(3, 11\), got float32\[6, 11\]",
    ),
    "bias_v as wide as keys": (
        {"bias_k": ones(K, H), "bias_v": ones(K, H)},
        r"bias_v: expected \(K, Hv\) = \(3, 13\), got float32\[3, 11\]",
    ),
    "bias_k of another dtype": (
        {"bias_k": ones(K, H, dtype=np.float16), "bias_v": ones(K, HV)},
        "bias_k: expected the query's dtype float32, got float16",
    ),
    "add_zero_attn of 1": (
        {"add_zero_attn": 1},
        "add_zero_attn: expected a static Python bool, got int 1",
    ),
    "a sink per key/value head": (
        {"sinks": ones(K)},
        r"sinks: expected \(N,\) = \(6,\), got float32",
    ),
    "a number for sinks": ({"sinks": 1.0}, "sinks: expected a NumPy or JAX array, got float"),
    "keep without extra columns": (
        {"dropout": Dropout(0.1, keep=ones(T, S, dtype=bool)), "add_zero_attn": True},
        r"dropout.keep: expected .* \(B, N, T, S \+ E\) = \(2, 6, 5, 8\), got bool\[5, 7\]",
    ),
    "unknown kernel": ({"implementation": "flash"}, "implementation: .*'dense', got 'flash'"),
}


@pytest.mark.parametrize("name", BAD)
def test_each_bad_argument_is_named(name):
    changed, says = BAD[name]
    for call in (dot_product_attention, explain_kernel):
        with pytest.raises(ArgumentError, match=says) as error:
            call(**{**GOOD, **changed})
        assert str(error.value).startswith(call.__name__)


@pytest.mark.parametrize(
    "name",
    [
        *("T of 0", "other head_dim", "heads not by kv heads", "mask of rank 3", "float mask"),
        *("boolean bias", "lengths of another batch", "is_causal of 1", "softcap of 0"),
    ],
)
def test_weights_refuse_alike(name):
    changed, says = BAD[name]
    arguments = {key: x for key, x in {**GOOD, **changed}.items() if key != "value"}
    with pytest.raises(ArgumentError, match=says) as error:
        attention_weights(**arguments)
    assert str(error.value).startswith("attention_weights")


@pytest.mark.slow
def test_the_good_call_is_good():
    assert dot_product_attention(**GOOD).shape == (B, T, N, HV)


def test_every_problem_is_told_at_once():
    with pytest.raises(ArgumentError) as error:
        dot_product_attention(
            ones(B, T, N, H, dtype=int),
            ones(B, S, K),
            ones(B, S, K, HV, dtype=np.float64),
            ones(T, S),
            is_causal="yes",
            bias=ones(T, S, dtype=bool),
            scale="big",
            softcap=0,
            dropout=1,
            implementation="flash",
        )
    named = ("query", "key", "value", "mask", "is_causal", "bias", "scale", "softcap", "dropout")
    for argument in (*named, "implementation"):
        assert f"- {argument}: " in str(error.value)
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, TypeError)


def test_a_traced_flag_is_told_how_to_be_static():
    with pytest.raises(TypeError, match=r"is_causal: .*static_argnames, or close over it"):
        jax.jit(dot_product_attention)(**GOOD, is_causal=True)


@pytest.mark.slow
def test_float64_is_refused_without_x64_and_taken_with_it():
    arrays = {name: x.astype(np.float64) for name, x in GOOD.items()}
    abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
    for call, given in ((dot_product_attention, arrays), (explain_kernel, abstract)):
        with pytest.raises(ValueError, match="JAX_ENABLE_X64=1"):
            call(**given)
    with jax.enable_x64(True):
        assert dot_product_attention(**arrays).dtype == jnp.float64


DROPOUT_BAD = {
    "rate above 1": ({"rate": 1.1, "keep": ones(2, dtype=bool)}, r"rate: expected .* \[0, 1\]"),
    "rate below 0": ({"rate": -0.1, "keep": ones(2, dtype=bool)}, r"rate: expected .* \[0, 1\]"),
    "rate of nan": ({"rate": float("nan"), "keep": ones(2, dtype=bool)}, "rate: expected"),
    "rate of True": ({"rate": True, "keep": ones(2, dtype=bool)}, "rate: expected"),
    "neither": ({"rate": 0.1}, "expected key or keep, got neither"),
    "both": (
        {"rate": 0.1, "keep": ones(2, dtype=bool), "key": jax.random.key(0)},
        "expected key or keep, got both",
    ),
    "a seed": ({"rate": 0.1, "key": 0}, r"key: expected one jax.random.key\(...\), got int 0"),
    "many keys": ({"rate": 0.1, "key": jax.random.split(jax.random.key(0))}, "key: expected one"),
    "keep of floats": ({"rate": 0.1, "keep": ones(2)}, "keep: expected a boolean array"),
}


@pytest.mark.parametrize("name", DROPOUT_BAD)
def test_dropout_refuses(name):
    arguments, says = DROPOUT_BAD[name]
    with pytest.raises(ArgumentError, match=says):
        Dropout(**arguments)
