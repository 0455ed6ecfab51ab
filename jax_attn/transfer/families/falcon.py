"""Falcon in its three forms: one key/value head, grouped heads, a key and a value for each head.

With rotary positions, or ALiBi in their place.
"""

import math

from jax_attn.transfer.families.config import flag, kv_heads, number, share
from jax_attn.transfer.families.family import BiasTraits, Config, Family, Place, Traits
from jax_attn.transfer.families.heads import TASKS, lm_head
from jax_attn.transfer.families.rope import FREQUENCIES, rotary
from jax_attn.transfer.layout import Layout
from jax_attn.transfer.layouts import (
    EMBEDDING,
    FROM_HEADS,
    LAYER_NORM,
    LINEAR,
    QKV_BIASES,
    QKV_KERNELS,
)
from jax_attn.transfer.rows import row
from jax_attn.transfer.steps import Sizes, grouped, heads, inward, linear, packed

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


def _form(config: Config) -> str:
    if flag(config, "new_decoder_architecture", default=False):
        return "grouped"
    return "one" if flag(config, "multi_query", default=True) else "each"


def _block(config: Config) -> Layout:
    """Grouped, or each its own: by key/value head its queries, its key, its value. One: all the
    queries, the key, the value."""
    if _form(config) == "one":
        weight, bias = (packed, linear, heads), (packed, heads)
    else:
        weight, bias = (grouped, inward), (grouped,)
    return Layout(
        row("query_key_value.weight", QKV_KERNELS, *weight),
        row("query_key_value.bias", QKV_BIASES, *bias),
        FROM_HEADS.under("dense", "out_proj"),
        FREQUENCIES,
    )


def _rest(config: Config) -> Layout:
    theirs, ours = "h.{layer}", "layers.{layer}"
    return Layout(
        EMBEDDING.under("word_embeddings", "token_embedding"),
        *(LAYER_NORM.under(f"{theirs}.{a}", f"{ours}.{b}") for a, b in _norms(config).items()),
        LINEAR.under(f"{theirs}.mlp.dense_h_to_4h", f"{ours}.mlp.up"),
        LINEAR.under(f"{theirs}.mlp.dense_4h_to_h", f"{ours}.mlp.down"),
        LAYER_NORM.under("ln_f", "final_norm"),
    )


def _norms(config: Config) -> dict[str, str]:
    """One norm before attention and MLP alike, or one for each, by either of two names."""
    if not flag(config, "parallel_attn", default=True):
        return {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    usual = 2 if _form(config) == "grouped" else 1
    if number(config, "num_ln_in_parallel_attn", default=usual) == 2:
        return {"ln_attn": "attention_norm", "ln_mlp": "mlp_norm"}
    return {"input_layernorm": "attention_norm"}


def _head(config: Config) -> Layout:
    return lm_head(config, "transformer.word_embeddings.weight", tied_by_default=True) + TASKS


def _traits(config: Config, prefix: str) -> Traits:
    config = {**_DEFAULTS, **config}
    D, N, H = share(config, "hidden_size", "num_attention_heads")
    K = {"one": 1, "each": N}.get(_form(config))
    K = K or kv_heads(config, "num_kv_heads", "num_attention_heads")
    has_alibi, has_bias = flag(config, "alibi"), flag(config, "bias")
    # The scale is taken of scores and bias together.
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


FALCON = Family(
    name="falcon",
    model_types=("falcon",),
    roots=("transformer", ""),
    places=(Place("h.{layer}.self_attention", "layers.{layer}.attention"),),
    block=_block,
    rest=_rest,
    head=_head,
    traits=_traits,
)
