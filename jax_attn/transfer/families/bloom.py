"""BLOOM: query, key and value by turns in one projection; scores fall with the distance."""

from jax_attn.transfer.families.config import number, share
from jax_attn.transfer.families.decoders import MLP, NORMS, heads
from jax_attn.transfer.families.family import BiasTraits, Config, Family, Place, Traits
from jax_attn.transfer.layout import Layout
from jax_attn.transfer.layouts import BY_TURNS, EMBEDDING, FROM_HEADS, LAYER_NORM
from jax_attn.transfer.steps import Sizes


def _block(config: Config) -> Layout:
    return BY_TURNS.under("query_key_value", "") + FROM_HEADS.under("dense", "out_proj")


def _rest(config: Config) -> Layout:
    return Layout(
        EMBEDDING.under("word_embeddings", "token_embedding"),
        LAYER_NORM.under("word_embeddings_layernorm", "embedding_norm"),
        (NORMS + MLP).under("h.{layer}", "layers.{layer}"),
        LAYER_NORM.under("ln_f", "final_norm"),
    )


def _head(config: Config) -> Layout:
    return heads(config, "transformer.word_embeddings.weight")


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
