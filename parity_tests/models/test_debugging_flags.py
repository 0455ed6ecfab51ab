"""JAX's debugging flags find faults of programs, and none here: all works under each of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_attn import models
from jax_attn.attention import Alibi, Dropout, Mask, attention_weights, dot_product_attention
from jax_attn.attention.rotary import Rotary, rotate
from jax_attn.nn import GroupedQueryAttention, RelativeBias

FLAGS = {
    "jax_disable_jit": True,
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_debug_infs": True,
    "jax_debug_nans": True,
}
B, T, N, K, H = 2, 5, 4, 2, 8
LENGTHS = np.array([5, 2])
# The first query of each row sees no key.
PADDED = Mask.causal(-1) & Mask.lengths(LENGTHS) & Mask.array(np.tri(T, dtype=bool))
PACKED = Mask.segments(*[np.array([[0, 0, 1, 1, 1]] * B)] * 2)


def drawn(*shape):
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


Q, KV = drawn(B, T, N, H), drawn(B, T, K, H)
BIAS, SINKS, EXTRA = drawn(N, T, T), drawn(N), drawn(K, H)


def attended(mask, **options):
    """The function of queries, and its gradient."""

    def run():
        def total(q):
            return jnp.square(dot_product_attention(q, KV, KV, mask, **options)).sum()

        return jax.value_and_grad(total)(jnp.asarray(Q))

    return run


def module(**options):
    rngs = nnx.Rngs(0)
    made = GroupedQueryAttention(24, N, K, head_dim=H, rngs=rngs, **options)
    made.eval()
    return made, jnp.asarray(drawn(B, T, 24))


def attended_by_module():
    position_bias = RelativeBias(N, rngs=nnx.Rngs(1))
    own, x = module(rotary=Rotary(), qk_norm=nnx.RMSNorm, position_bias=position_bias, sinks=True)
    return own(x, mask=PADDED)


def read_through_a_cache():
    own, x = module(rotary=Rotary())
    first, cache = own(x, cache=own.empty_cache(B, 8), mask=Mask.lengths(LENGTHS))
    return first, *own(x[:, :2], cache=cache)


SMALL = {"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": N}
CONFIGS = {
    "llama": SMALL | {"num_key_value_heads": K, "intermediate_size": 29, "pad_token_id": 0},
    "bloom": {"vocab_size": 41, "hidden_size": 24, "n_layer": 1, "n_head": N},
    "roberta": SMALL | {"intermediate_size": 29, "max_position_embeddings": 13},
}
TOKENS = np.random.default_rng(3).integers(3, 41, (B, T))


def model(kind, heads):
    named = {"model_type": kind, "architectures": [f"{kind}For{heads}"]}
    return models.from_config(CONFIGS[kind] | named, rngs=nnx.Rngs(0))


def logits(kind, heads="CausalLM"):
    def run():
        own = model(kind, heads)
        segments = None if "Sequence" in heads else np.array([[0, 0, 1, 1, 1]] * B)
        return own(TOKENS, LENGTHS, segments=segments).logits, own(TOKENS).logits

    return run


# name -> a function without arguments
CALLS = {
    "dense": attended(PADDED, bias=BIAS, softcap=3.0, implementation="dense"),
    "dense, open": attended(None, implementation="dense"),
    "dense, extra keys": attended(PADDED, bias_k=EXTRA, bias_v=EXTRA, sinks=SINKS),
    "dense, dropout": attended(PACKED, dropout=Dropout(0.3, key=jax.random.key(0))),
    "blocked": attended(PADDED, bias=BIAS, softcap=3.0, implementation="blocked"),
    "blocked, packed": attended(PACKED & Mask.causal(), implementation="blocked"),
    "weights": lambda: attention_weights(Q, KV, PADDED, bias=BIAS),
    "rotate": lambda: rotate(Q, None, Rotary()),
    "alibi": lambda: Alibi(N)(T, T),
    "dropout": lambda: Dropout(0.3, keep=np.tri(N, H, dtype=bool)).apply(jnp.asarray(Q)),
    "masks": lambda: (PADDED & Mask.array(np.ones((B, N, T, T), bool))).materialize(T, T),
    "module": attended_by_module,
    "cache": read_through_a_cache,
    "llama": logits("llama"),
    "llama, classes": logits("llama", "SequenceClassification"),
    "bloom": logits("bloom"),
    "roberta": logits("roberta", "MaskedLM"),
    "generate": lambda: model("llama", "CausalLM").generate(TOKENS, LENGTHS, 3, eos_token_id=2),
}


ROUNDINGS = 2**8
"""Roundings between any two results here: programs that JAX compiles otherwise sum otherwise."""


def assert_near(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    limit = ROUNDINGS * np.finfo(np.float32).eps * np.abs(x).max(initial=0)
    assert np.abs(x - y).max(initial=0) <= limit


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_every_flag_changes_nothing(name):
    usual = CALLS[name]()
    for flag, value in FLAGS.items():
        before = getattr(jax.config, flag)
        jax.config.update(flag, value)
        try:
            found = CALLS[name]()
        finally:
            jax.config.update(flag, before)
        jax.tree.map(assert_near, usual, found)


@pytest.mark.parametrize("flag", ["jax_numpy_rank_promotion", "jax_debug_infs"])
def test_the_flags_still_find_faults_of_programs(flag):
    """They are set around the calls above, and no call unsets them."""
    before = getattr(jax.config, flag)
    jax.config.update(flag, FLAGS[flag])
    try:
        dot_product_attention(Q, KV, KV, PADDED)
        with pytest.raises((ValueError, FloatingPointError)):
            jnp.ones((2, 3)) + jnp.full(3, jnp.inf)
    finally:
        jax.config.update(flag, before)
