"""JAX's debugging flags find faults of programs, and none here: all works under each of them."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import core as jex

from helpers.attention.attention_definition import ROUNDOFF
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
COMPILED_OTHERWISE = ("jax_disable_jit", "jax_debug_infs")
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


def read_through_a_cache(**options):
    own, x = module(**options)
    first, cache = own(x, cache=own.empty_cache(B, 8), mask=Mask.lengths(LENGTHS))
    return first, *own(x[:, :2], cache=cache)


SMALL = {"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": N}
CONFIGS = {
    "llama": SMALL | {"num_key_value_heads": K, "intermediate_size": 29, "pad_token_id": 0},
    "bloom": {"vocab_size": 41, "hidden_size": 24, "n_layer": 1, "n_head": N},
    "roberta": SMALL | {"intermediate_size": 29, "max_position_embeddings": 13},
}
TOKENS = np.random.default_rng(3).integers(3, 41, (B, T))


def made(kind, heads):
    named = {"model_type": kind, "architectures": [f"{kind}For{heads}"]}
    return models.from_config(CONFIGS[kind] | named, rngs=nnx.Rngs(0))


# Made once, and under no flag: that is a row of its own.
model = functools.cache(made)


def logits(kind, heads="CausalLM"):
    own = model(kind, heads)
    segments = None if "Sequence" in heads else np.array([[0, 0, 1, 1, 1]] * B)
    return own(TOKENS, LENGTHS, segments=segments).logits, own(TOKENS).logits


def drawn_by_key():
    how = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}
    how |= {"eos_token_id": 2, "key": jax.random.key(0)}
    return model("llama", "CausalLM").generate(TOKENS, LENGTHS, 3, **how)


# name -> a function without arguments
CALLS = {
    "dense": attended(PADDED, bias=BIAS, softcap=3.0, implementation="dense"),
    "dense, open": attended(None, implementation="dense"),
    "dense, extra keys": attended(PADDED, bias_k=EXTRA, bias_v=EXTRA, sinks=SINKS),
    "dense, dropout": attended(PACKED, dropout=Dropout(0.3, key=jax.random.key(0))),
    "blocked": attended(PADDED, bias=BIAS, softcap=3.0, implementation="blocked"),
    "blocked, extra keys": attended(PADDED, sinks=SINKS, implementation="blocked"),
    "blocked, packed": attended(PACKED & Mask.causal(), implementation="blocked"),
    "weights": lambda: attention_weights(Q, KV, PADDED, bias=BIAS),
    "rotate": lambda: rotate(Q, None, Rotary()),
    "alibi": lambda: Alibi(N)(T, T),
    "dropout": lambda: Dropout(0.3, keep=np.tri(N, H, dtype=bool)).apply(jnp.asarray(Q)),
    "masks": lambda: (PADDED & Mask.array(np.ones((B, N, T, T), bool))).materialize(T, T),
    "module": attended_by_module,
    "cache": lambda: read_through_a_cache(rotary=Rotary()),
    "cache, alibi": lambda: read_through_a_cache(position_bias=Alibi(N, rounded=True)),
    "llama, made": lambda: nnx.to_pure_dict(nnx.state(made("llama", "CausalLM"))),
    "llama": lambda: logits("llama"),
    "llama, classes": lambda: logits("llama", "SequenceClassification"),
    "bloom": lambda: logits("bloom"),
    "roberta": lambda: logits("roberta", "MaskedLM"),
    "generate": lambda: model("llama", "CausalLM").generate(TOKENS, LENGTHS, 3, eos_token_id=2),
    "draw": drawn_by_key,
}


def roundings(jaxpr):
    """Count the roundings on the longest way through a program: one for each operation, and as many
    as there are summands for a sum."""
    count = {}

    def of(atom):
        return 0 if isinstance(atom, jex.Literal) else count.get(atom, 0)

    for eqn in jaxpr.eqns:
        inside = [roundings(program) for program in jex.jaxprs_in_params(eqn.params)]
        own = eqn.params.get("length", 1) * max(inside) if inside else summands(eqn)
        before = max(map(of, eqn.invars), default=0)
        count |= dict.fromkeys(eqn.outvars, before + own)
    return max(map(of, jaxpr.outvars), default=0)


def summands(eqn):
    shape = eqn.invars[0].aval.shape if eqn.invars else ()
    axes = eqn.params.get("axes", ())
    if eqn.primitive.name == "dot_general":
        (axes, _), _ = eqn.params["dimension_numbers"]
    return math.prod(shape[axis] for axis in axes)


def limit(call):
    """How far results of two programs for one call may be apart, relative to the largest number."""
    return 2 * roundings(jax.make_jaxpr(call)().jaxpr) * ROUNDOFF["float32"]


def assert_near(x, y, limit):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    assert np.abs(x - y).max(initial=0) <= limit * np.abs(x).max(initial=0)


@contextlib.contextmanager
def setting(flag):
    before = getattr(jax.config, flag)
    jax.config.update(flag, FLAGS[flag])
    try:
        yield
    finally:
        jax.config.update(flag, before)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_every_flag_changes_nothing(name):
    """No bit, or no more than rounding if operations are compiled together otherwise."""
    call = CALLS[name]
    usual, allowed = call(), limit(call)
    for flag in FLAGS:
        with setting(flag):
            found = call()
        nearness = allowed if flag in COMPILED_OTHERWISE else 0
        jax.tree.map(functools.partial(assert_near, limit=nearness), usual, found)


@pytest.mark.slow
def test_the_limit_shows_a_small_mistake():
    call, other = (attended(PADDED, bias=BIAS, softcap=cap) for cap in (3.0, 3.001))
    (_, usual), (_, found) = call(), other()
    with pytest.raises(AssertionError):
        assert_near(usual, found, limit(call))


@pytest.mark.parametrize("flag", ["jax_numpy_rank_promotion", "jax_debug_infs"])
def test_the_flags_still_find_faults_of_programs(flag):
    """They are set around the calls above, and no call unsets them."""
    with setting(flag):
        dot_product_attention(Q, KV, KV, PADDED)
        with pytest.raises((ValueError, FloatingPointError)):
            jnp.ones((2, 3)) + jnp.full(3, jnp.inf)
