"""OPT: a table of positions that begins at row 2; norms before or after attention and MLP.

If token vectors do not have the model's width, linear maps project them in and out.
"""

from functools import partial

from jax_attn.families.config import Reading
from jax_attn.families.decoders import heads
from jax_attn.families.family import Family, Prefixes
from jax_attn.families.traits import (
    EmbeddingTraits,
    MLPTraits,
    ModelTraits,
    NormPlacement,
    NormTraits,
    PositionTraits,
    Traits,
)
from jax_attn.families.whole import activation, decoder, padding, stacked
from jax_attn.transfer import EMBEDDING, LAYER_NORM, LINEAR, Layout, Sizes
from jax_attn.transfer.table.layouts import BIASLESS, projections

_OFFSET = 2
_EPSILON = 1e-5
"""torch's default, which no config changes."""
_DEFAULTS = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
}


def _block(config: Reading) -> Layout:
    return projections("q_proj", "k_proj", "v_proj", "out_proj")


def _rest(config: Reading) -> Layout:
    config = config.over(_DEFAULTS)
    layer = "layers.{layer}"
    dense = LINEAR if config.flag("enable_bias") else BIASLESS
    if not config.flag("layer_norm_elementwise_affine"):
        expected = "true: norms without weights are not supported"
        config.refuse("layer_norm_elementwise_affine", False, expected)
    D = config.number("hidden_size")
    maps = Layout(
        BIASLESS.under("project_in", "embedding_projection"),
        BIASLESS.under("project_out", "output_projection"),
    )
    return Layout(
        EMBEDDING.under("embed_tokens", "token_embedding"),
        EMBEDDING.under("embed_positions", "position_embedding"),
        *([maps] if config.number("word_embed_proj_dim", default=D) != D else ()),
        LAYER_NORM.under(f"{layer}.self_attn_layer_norm", f"{layer}.attention_norm"),
        LAYER_NORM.under(f"{layer}.final_layer_norm", f"{layer}.mlp_norm"),
        dense.under(f"{layer}.fc1", f"{layer}.mlp.up"),
        dense.under(f"{layer}.fc2", f"{layer}.mlp.down"),
        *([LAYER_NORM.under("final_layer_norm", "final_norm")] if _ends_normed(config) else ()),
    )


def _ends_normed(config: Reading) -> bool:
    config = config.over(_DEFAULTS)
    is_removed = config.flag("_remove_final_layer_norm")
    return config.flag("do_layer_norm_before") and not is_removed


def _traits(config: Reading, prefix: str) -> Traits:
    config = config.over(_DEFAULTS)
    D, N, H = config.share("hidden_size", "num_attention_heads")
    has_bias = config.flag("enable_bias")
    return Traits(D, Sizes(N, N, H), use_bias=has_bias, use_out_bias=has_bias, is_causal=True)


def _model(config: Reading, attention: tuple[Traits, ...]) -> ModelTraits:
    config = config.over(_DEFAULTS)
    D, norm = config.number("hidden_size"), NormTraits("layer", _EPSILON)
    rows = config.number("max_position_embeddings") + _OFFSET
    vocabulary = config.number("vocab_size")
    embedding = EmbeddingTraits(
        vocabulary,
        width=config.number("word_embed_proj_dim", default=D),
        positions=PositionTraits(rows, _OFFSET, "mask"),
        pad=padding(config, vocabulary, 1),
    )
    mlp = MLPTraits(
        config.number("ffn_dim"),
        activation(config, "activation_function", "relu"),
        use_bias=config.flag("enable_bias"),
    )
    placement: NormPlacement = "pre" if config.flag("do_layer_norm_before") else "post"
    blocks = stacked(attention, mlp, norm, placement)
    final_norm = norm if _ends_normed(config) else None
    return decoder(config, D, embedding, blocks, final_norm, tied=True)


OPT = Family(
    *("opt", _block, _rest, partial(heads, embedding="model.decoder.embed_tokens.weight")),
    _traits,
    places=(Prefixes("layers.{layer}.self_attn"),),
    roots=("model.decoder", "decoder", ""),
    model_of=_model,
)
