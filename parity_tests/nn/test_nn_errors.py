"""What the NNX modules refuse, when they are made and when they are called, by name."""

import numpy as np
import pytest
from flax import nnx

from helpers.attention.small_attention import B, S, T, build, inputs, numpy_weights
from jax_attn.attention import Alibi, ArgumentError
from jax_attn.nn import GroupedQueryAttention, MultiHeadAttention, MultiQueryAttention

pytestmark = pytest.mark.filterwarnings("error")

CONSTRUCTOR = {
    "embed_dim not by heads": ({"embed_dim": 14}, "embed_dim: .*multiple of num_heads=6.*got 14"),
    "heads not by kv heads": ({"num_kv_heads": 4}, "num_heads: .*num_kv_heads=4, got 6"),
    "no heads": ({"num_heads": 0}, "num_heads: expected an int ≥ 1, got int 0"),
    "negative heads": ({"num_kv_heads": -2}, "num_kv_heads: expected an int ≥ 1, got int -2"),
    "heads of True": ({"num_heads": True}, "num_heads: expected an int ≥ 1, got bool True"),
    "heads of a float": ({"num_heads": 6.0}, "num_heads: expected an int ≥ 1, got float 6.0"),
    "embed_dim of 0": ({"embed_dim": 0}, "embed_dim: expected an int ≥ 1"),
    "head_dim of 0": ({"head_dim": 0}, "head_dim: expected an int ≥ 1"),
    "kdim of a string": ({"kdim": "7"}, "kdim: expected an int ≥ 1, got str '7'"),
    "vdim of -1": ({"vdim": -1}, "vdim: expected an int ≥ 1"),
    "dropout of 1.5": ({"dropout_rate": 1.5}, r"dropout_rate: expected a number in \[0, 1\]"),
    "out_dropout of -1": ({"out_dropout_rate": -1}, "out_dropout_rate: expected a number in"),
    "float64 without x64": ({"dtype": "float64"}, "dtype: float64 needs x64"),
    "float64 parameters": ({"param_dtype": np.float64}, "param_dtype: float64 needs x64"),
    "integer dtype": ({"dtype": "int32"}, "dtype: expected float32, .*got dtype int32"),
    "no dtype": ({"param_dtype": "floaty"}, "param_dtype: expected float32, .*got dtype 'floaty'"),
    "softcap of 0": ({"softcap": 0}, "softcap: expected a finite plain number > 0"),
    "scale of infinity": ({"scale": float("inf")}, "scale: expected a finite plain number"),
    "a bias of no projection": (
        {"use_bias": ("q_proj", "o_proj")},
        r"use_bias: expected True, False, or names among q_proj, k_proj, v_proj, got",
    ),
    "names in a list in a list": ({"use_bias": [["q_proj"]]}, "use_bias: expected True, False, or"),
    "the name of one alone": ({"use_bias": "q_proj"}, "use_bias: expected True, False, or names"),
    "a bias of 1": (
        {"use_bias": 1},
        "use_bias: expected True, False, or names among .*, got int 1",
    ),
    "add_bias_kv of 1": ({"add_bias_kv": 1}, "add_bias_kv: expected True or False, got int 1"),
    "add_zero_attn of None": ({"add_zero_attn": None}, "add_zero_attn: expected True or False"),
    "sinks as an array": (
        {"sinks": np.ones(6)},
        r"sinks: expected True or False, got float64\[6\]",
    ),
    "unknown kernel": ({"implementation": "flash"}, "implementation: expected None or one of"),
    "a seed for rngs": ({"rngs": 0}, "rngs: expected nnx.Rngs, got int"),
    "a precision that JAX lacks": (
        {"precision": "bf16"},
        "precision: expected None or one that jax.lax takes, got str 'bf16'",
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTOR)
def test_the_constructor_refuses(name):
    changed, says = CONSTRUCTOR[name]
    good = {"embed_dim": 12, "num_heads": 6, "num_kv_heads": 3, "rngs": nnx.Rngs(0)}
    with pytest.raises(ArgumentError, match=says) as error:
        GroupedQueryAttention(**{**good, **changed})
    assert str(error.value).startswith("GroupedQueryAttention")


def test_the_constructor_tells_every_problem_at_once():
    with pytest.raises(ArgumentError, match="6 problems") as error:
        MultiQueryAttention(
            0, 2.5, dropout_rate=2, out_dropout_rate=-1, kdim=0, dtype="int8", rngs=nnx.Rngs(0)
        )
    for argument in ("embed_dim", "num_heads", "dropout_rate", "out_dropout_rate", "kdim", "dtype"):
        assert f"- {argument}: " in str(error.value)


X = np.ones((B, T, 12), np.float32)
CALLS = {
    "features": ([X[..., 1:]], {}, "query: expected embed_dim = 12 features, got float32"),
    "rank": ([X[0]], {}, r"query: expected rank 3 \(B, T, embed_dim\), got float32\[5, 12\]"),
    "no queries": ([X[:, :0]], {}, "query: expected T ≥ 1"),
    "integers": ([X.astype(int)], {}, "query: expected float32.*got dtype int64"),
    "float64": ([X.astype(np.float64)], {}, "query: float64 needs x64"),
    "batch": ([X, np.ones((3, S, 12), np.float32)], {}, "query, key, value: expected one B"),
    "lengths": ([X, X, X[:, 1:]], {}, "key, value: expected one S"),
    "a list": ([[1.0]], {}, "query: expected a NumPy or JAX array, got list"),
    "mask of rank 3": ([X], {"mask": np.ones((B, T, T), bool)}, "mask: .* both as"),
    "is_causal": ([X], {"is_causal": 1}, "is_causal: expected a static Python bool"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_call_refuses(name):
    arrays, options, says = CALLS[name]
    module = MultiHeadAttention(12, 3, **numpy_weights())
    with pytest.raises(ArgumentError, match=says):
        module(*arrays, **options)


BIASES = {
    "a mask": (np.ones((T, T), bool), r"bias: expected floats .* got bool\[5, 5\]: a mask"),
    "float64": (np.ones((T, T)), "bias: float64 needs x64"),
    "integers": (np.ones((T, T), np.int32), "bias: expected float32.*got dtype int32"),
    "a list": ([[0.0]], "bias: expected a NumPy or JAX array, got list"),
    "another shape": (
        np.ones((3, 3), np.float32),
        r"bias: expected a shape that broadcasts to \(B, N, T, S\) = \(2, 3, 5, 5\), got",
    ),
}


@pytest.mark.parametrize("of", ["__call__", "attention_weights"])
@pytest.mark.parametrize("name", BIASES)
def test_a_bias_beside_that_by_position_is_refused_alike(name, of):
    bias, says = BIASES[name]
    module = MultiHeadAttention(12, 3, position_bias=Alibi(3), rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentError, match=says):
        getattr(module, of)(X, bias=bias)


def test_rngs_that_are_none_are_refused_where_nothing_is_drawn():
    module = MultiHeadAttention(12, 3, **numpy_weights())
    with pytest.raises(ArgumentError, match=r"rngs: expected nnx\.Rngs or .* got str 'junk'"):
        module(X, rngs="junk")


def test_a_key_that_must_be_given_is_named():
    with pytest.raises(
        ArgumentError, match=r"key: expected kdim = 17 .*\(query, because key is None"
    ):
        build()(inputs()[0])
