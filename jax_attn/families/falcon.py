"""Falcon, and BLOOM from which it descends: query, key and value in one projection.

Falcon has three forms: one key/value head, grouped heads, or a key and a value for each head. It
has rotary positions or ALiBi. BLOOM has a key and a value for each head, and ALiBi.
"""

import math
from functools import partial

from jax_attn.families.config import Reading
from jax_attn.families.decoders import FREQUENCIES, heads, mlp, norms, rotary
from jax_attn.families.family import Family, Prefixes
from jax_attn.families.traits import (
    BiasTraits,
    EmbeddingTraits,
    MLPTraits,
    ModelTraits,
    NormPlacement,
    NormTraits,
    Traits,
)
from jax_attn.families.whole import activation, decoder, stacked
from jax_attn.transfer import EMBEDDING, LAYER_NORM, LINEAR, Layout, Sizes
from jax_attn.transfer.table.layouts import BIASLESS, fused

_HEAD = partial(heads, embedding="transformer.word_embeddings.weight")
_PLACES = (Prefixes("h.{layer}.self_attention"),)
_WIDTH = 4544
_DEFAULTS = {
    "num_attention_heads": 71,
    "max_position_embeddings": 2048,
    "new_decoder_architecture": False,
    "multi_query": True,
    "parallel_attn": True,
    "alibi": False,
    "bias": False,
}


def _form(config: Reading) -> str:
    has_one = config.flag("multi_query", default=True)
    if config.flag("new_decoder_architecture", default=False):
        return "grouped"
    return "one" if has_one else "each"


def _block(config: Reading) -> Layout:
    return fused("query_key_value", "dense", by_head=_form(config) != "one") + FREQUENCIES


def _rest(config: Reading) -> Layout:
    dense = LINEAR if config.flag("bias", default=False) else BIASLESS
    return Layout(
        EMBEDDING.under("word_embeddings", "token_embedding"),
        (_norms(config) + mlp(dense)).under("h.{layer}", "layers.{layer}"),
        LAYER_NORM.under("ln_f", "final_norm"),
    )


def _norms(config: Reading) -> Layout:
    """Return the table of the norm that attention and MLP share, or of a norm for each."""
    count = _norm_count(config)
    if not config.flag("parallel_attn", default=True):
        return norms()
    if count == 2:
        return Layout(
            LAYER_NORM.under("ln_attn", "attention_norm"), LAYER_NORM.under("ln_mlp", "mlp_norm")
        )
    return LAYER_NORM.under("input_layernorm", "attention_norm")


def _width(config: Reading, default: int) -> int:
    """Return D, which old configs call n_embed."""
    return config.number("n_embed", "hidden_size", default=default)


def _traits(config: Reading, prefix: str) -> Traits:
    config = config.over(_DEFAULTS)
    D, N = _width(config, _WIDTH), config.number("num_attention_heads")
    H = config.divided(("hidden_size", D), ("num_attention_heads", N))
    config.number("num_kv_heads", default=None)  # checked in every form, used in only one
    K = {"one": 1, "each": N}.get(_form(config))
    K = K or config.kv_heads("num_kv_heads", "num_attention_heads")
    has_alibi, has_bias = config.flag("alibi", default=False), config.flag("bias")
    # Falcon scales the scores after it has added the bias.
    bias = BiasTraits("alibi", {"factor": 1 / math.sqrt(H)}, rounded=True)
    turning = rotary(config, H)  # checked even with ALiBi
    return Traits(
        D,
        Sizes(N, K, H),
        use_bias=has_bias,
        use_out_bias=has_bias,
        is_causal=True,
        rotary=None if has_alibi else turning,
        bias=bias if has_alibi else None,
    )


def _norm_count(config: Reading) -> int:
    """Return the number of norms before attention and MLP in a parallel block."""
    usual = 2 if _form(config) == "grouped" else 1
    return config.number("num_ln_in_parallel_attn", default=usual)


def _model(config: Reading, attention: tuple[Traits, ...]) -> ModelTraits:
    config = config.over(_DEFAULTS)
    D, has_bias, is_parallel = (
        _width(config, _WIDTH),
        config.flag("bias"),
        config.flag("parallel_attn"),
    )
    is_new, count = config.flag("new_decoder_architecture"), _norm_count(config)
    if is_new and not is_parallel:
        config.refuse("parallel_attn", False, "true with new_decoder_architecture")
    if is_parallel and count == 2 and not is_new:
        config.refuse("num_ln_in_parallel_attn", 2, "1 without new_decoder_architecture")
    norm = NormTraits("layer", config.real("layer_norm_epsilon", default=1e-5))
    mlp = MLPTraits(
        config.number("ffn_hidden_size", default=4 * D),
        activation(config, "activation", "gelu"),
        use_bias=has_bias,
    )
    placement: NormPlacement = "parallel" if is_parallel else "pre"
    embedding = EmbeddingTraits(config.number("vocab_size", default=65024), width=D)
    shares_norm = is_parallel and count == 1
    blocks = stacked(attention, mlp, norm, placement, shares_norm=shares_norm)
    return decoder(config, D, embedding, blocks, norm, tied=True)


FALCON = Family("falcon", _block, _rest, _HEAD, _traits, places=_PLACES, model_of=_model)


# --- BLOOM --------------------------------------------------------------------------------------


def _bloom_block(config: Reading) -> Layout:
    return fused("query_key_value", "dense", by_head=True)


def _bloom_rest(config: Reading) -> Layout:
    return Layout(
        EMBEDDING.under("word_embeddings", "token_embedding"),
        LAYER_NORM.under("word_embeddings_layernorm", "embedding_norm"),
        (norms() + mlp()).under("h.{layer}", "layers.{layer}"),
        LAYER_NORM.under("ln_f", "final_norm"),
    )


def _bloom_traits(config: Reading, prefix: str) -> Traits:
    D = _width(config, 64)
    N = config.number("n_head", "num_attention_heads", default=8)
    H = config.divided(("hidden_size", D), ("n_head", N))
    bias = BiasTraits("alibi", {"factor": 1.0})
    return Traits(D, Sizes(N, N, H), is_causal=True, bias=bias)


def _bloom_model(config: Reading, attention: tuple[Traits, ...]) -> ModelTraits:
    if config.flag("apply_residual_connection_post_layernorm", default=False):
        expected = "false: a residual taken after the norm is not supported"
        config.refuse("apply_residual_connection_post_layernorm", True, expected)
    D = _width(config, 64)
    norm = NormTraits("layer", config.real("layer_norm_epsilon", default=1e-5))
    embedding = EmbeddingTraits(config.number("vocab_size", default=250880), width=D, norm=norm)
    blocks = stacked(attention, MLPTraits(4 * D, "gelu_tanh"), norm, "pre")
    return decoder(config, D, embedding, blocks, norm, tied=True)


BLOOM = Family(
    *("bloom", _bloom_block, _bloom_rest, _HEAD, _bloom_traits),
    places=_PLACES,
    model_of=_bloom_model,
)
