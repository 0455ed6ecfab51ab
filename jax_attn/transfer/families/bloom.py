"""BLOOM: query, key and value by turns in one projection; scores fall with the distance."""

from jax_attn.transfer.families.config import number, share
from jax_attn.transfer.families.family import BiasTraits, Config, Family, Place, Traits
from jax_attn.transfer.families.heads import TASKS, lm_head
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
from jax_attn.transfer.steps import Sizes, grouped, inward


def _block(config: Config) -> Layout:
    return Layout(
        row("query_key_value.weight", QKV_KERNELS, grouped, inward),
        row("query_key_value.bias", QKV_BIASES, grouped),
        FROM_HEADS.under("dense", "out_proj"),
    )


def _rest(config: Config) -> Layout:
    layer = "h.{layer}"
    return Layout(
        EMBEDDING.under("word_embeddings", "token_embedding"),
        LAYER_NORM.under("word_embeddings_layernorm", "embedding_norm"),
        LAYER_NORM.under(f"{layer}.input_layernorm", "layers.{layer}.attention_norm"),
        LAYER_NORM.under(f"{layer}.post_attention_layernorm", "layers.{layer}.mlp_norm"),
        LINEAR.under(f"{layer}.mlp.dense_h_to_4h", "layers.{layer}.mlp.up"),
        LINEAR.under(f"{layer}.mlp.dense_4h_to_h", "layers.{layer}.mlp.down"),
        LAYER_NORM.under("ln_f", "final_norm"),
    )


def _head(config: Config) -> Layout:
    return lm_head(config, "transformer.word_embeddings.weight", tied_by_default=True) + TASKS


def _traits(config: Config, prefix: str) -> Traits:
    D = number(config, "n_embed", "hidden_size", default=64)
    N = number(config, "n_head", "num_attention_heads", default=8)
    D, N, H = share({"hidden_size": D, "n_head": N}, "hidden_size", "n_head")
    bias = BiasTraits("alibi", {"factor": 1.0})
    return Traits(D, Sizes(N, N, H), is_causal=True, bias=bias)


BLOOM = Family(
    name="bloom",
    model_types=("bloom",),
    roots=("transformer", ""),
    places=(Place("h.{layer}.self_attention", "layers.{layer}.attention"),),
    block=_block,
    rest=_rest,
    head=_head,
    traits=_traits,
)
