"""BLOOM: query, key and value by turns in one projection; scores fall with the distance."""

from functools import partial

from jax_attn.transfer.families.config import Reading
from jax_attn.transfer.families.decoders import heads, mlp, norms
from jax_attn.transfer.families.family import BiasTraits, Family, Place, Traits
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.layouts import BY_TURNS, EMBEDDING, FROM_HEADS, LAYER_NORM
from jax_attn.transfer.table.steps import HeadSizes

_HEAD = partial(heads, embedding="transformer.word_embeddings.weight")


def _block(config: Reading) -> Layout:
    return BY_TURNS.under("query_key_value", "") + FROM_HEADS.under("dense", "out_proj")


def _rest(config: Reading) -> Layout:
    return Layout(
        EMBEDDING.under("word_embeddings", "token_embedding"),
        LAYER_NORM.under("word_embeddings_layernorm", "embedding_norm"),
        (norms() + mlp()).under("h.{layer}", "layers.{layer}"),
        LAYER_NORM.under("ln_f", "final_norm"),
    )


def _traits(config: Reading, prefix: str) -> Traits:
    D = config.number("n_embed", "hidden_size", default=64)
    N = config.number("n_head", "num_attention_heads", default=8)
    H = config.divided(("hidden_size", D), ("n_head", N))
    bias = BiasTraits("alibi", {"factor": 1.0})
    return Traits(D, HeadSizes(N, N, H), is_causal=True, bias=bias)


BLOOM = Family("bloom", _block, _rest, _HEAD, _traits, places=(Place("h.{layer}.self_attention"),))
