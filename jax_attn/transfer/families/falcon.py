"""Falcon and BLOOM, which it descends from: query, key and value in one projection.

Falcon has three forms: one key/value head, grouped heads, a key and a value for each head; with
rotary positions, or ALiBi in their place. BLOOM has a key and a value for each head, and ALiBi.
"""

import math
from functools import partial

from jax_attn.transfer.families.config import Reading
from jax_attn.transfer.families.decoders import FREQUENCIES, heads, mlp, norms, rotary
from jax_attn.transfer.families.family import BiasTraits, Family, Place, Traits
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.layouts import BIASLESS, EMBEDDING, LAYER_NORM, LINEAR, fused
from jax_attn.transfer.table.steps import Sizes

_HEAD = partial(heads, embedding="transformer.word_embeddings.weight")
_PLACES = (Place("h.{layer}.self_attention"),)
_DEFAULTS = {
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "max_position_embeddings": 2048,
    "new_decoder_architecture": False,
    "multi_query": True,
    "parallel_attn": True,
    "alibi": False,
    "bias": False,
}


def _form(config: Reading) -> str:
    if config.flag("new_decoder_architecture", default=False):
        return "grouped"
    return "one" if config.flag("multi_query", default=True) else "each"


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
    """The one norm that attention and MLP both read, or a norm for each, of either spelling."""
    usual = 2 if _form(config) == "grouped" else 1
    count = config.number("num_ln_in_parallel_attn", default=usual)
    if not config.flag("parallel_attn", default=True):
        return norms()
    if count == 2:
        return Layout(
            LAYER_NORM.under("ln_attn", "attention_norm"), LAYER_NORM.under("ln_mlp", "mlp_norm")
        )
    return LAYER_NORM.under("input_layernorm", "attention_norm")


def _traits(config: Reading, prefix: str) -> Traits:
    config = config.over(_DEFAULTS)
    D, N, H = config.share("hidden_size", "num_attention_heads")
    config.number("num_kv_heads", default=None)  # checked in every form, used in one
    K = {"one": 1, "each": N}.get(_form(config))
    K = K or config.kv_heads("num_kv_heads", "num_attention_heads")
    has_alibi, has_bias = config.flag("alibi"), config.flag("bias")
    # Falcon scales the scores after it has added the bias.
    bias = BiasTraits("alibi", {"factor": 1 / math.sqrt(H)})
    return Traits(
        D,
        Sizes(N, K, H),
        use_bias=has_bias,
        use_out_bias=has_bias,
        is_causal=True,
        rotary=None if has_alibi else rotary(config, H),
        bias=bias if has_alibi else None,
    )


FALCON = Family("falcon", _block, _rest, _HEAD, _traits, places=_PLACES)


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
    D = config.number("n_embed", "hidden_size", default=64)
    N = config.number("n_head", "num_attention_heads", default=8)
    H = config.divided(("hidden_size", D), ("n_head", N))
    bias = BiasTraits("alibi", {"factor": 1.0})
    return Traits(D, Sizes(N, N, H), is_causal=True, bias=bias)


BLOOM = Family("bloom", _bloom_block, _bloom_rest, _HEAD, _bloom_traits, places=_PLACES)
