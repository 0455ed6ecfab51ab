"""GPT-2: one packed projection with a weight (in, out), and a table of positions.

GPTBigCode is GPT-2 with linear layers and, usually, one key/value head.
"""

from dataclasses import replace
from functools import partial

from jax_attn.families.config import Reading
from jax_attn.families.decoders import heads as decoder_heads
from jax_attn.families.family import Family, Prefixes
from jax_attn.families.traits import (
    EmbeddingTraits,
    MLPTraits,
    ModelTraits,
    NormTraits,
    PositionTraits,
    Traits,
)
from jax_attn.families.whole import activation, decoder, stacked
from jax_attn.transfer import (
    EMBEDDING,
    LAYER_NORM,
    LINEAR,
    Layout,
    Sizes,
    heads,
    heads_in,
    ignored,
    linear,
    packed,
    row,
)
from jax_attn.transfer.table.layouts import QKV_BIASES, QKV_KERNELS, fused

# transformers' Conv1D stores (in, out), as Flax does.
_CONV1D = Layout(row("weight", "kernel"), row("bias", "bias"))


def _check_alone(config: Reading) -> None:
    """Refuse a decoder that also attends to an encoder."""
    if config.flag("add_cross_attention", default=False):
        config.refuse("add_cross_attention", True, "false: cross-attention is not supported")


def _rest(dense: Layout, config: Reading) -> Layout:
    """Return the table of all but the blocks in GPT-2's names. dense: that of an MLP's layer."""
    layer = "h.{layer}"
    return Layout(
        EMBEDDING.under("wte", "token_embedding"),
        EMBEDDING.under("wpe", "position_embedding"),
        LAYER_NORM.under(f"{layer}.ln_1", "layers.{layer}.attention_norm"),
        LAYER_NORM.under(f"{layer}.ln_2", "layers.{layer}.mlp_norm"),
        dense.under(f"{layer}.mlp.c_fc", "layers.{layer}.mlp.up"),
        dense.under(f"{layer}.mlp.c_proj", "layers.{layer}.mlp.down"),
        LAYER_NORM.under("ln_f", "final_norm"),
    )


def _head(config: Reading) -> Layout:
    return Layout(
        decoder_heads(config, "transformer.wte.weight"),
        LINEAR.under("multiple_choice_head.summary", "choice_head"),
    )


def _sizes(config: Reading) -> tuple[int, int, int]:
    """Return D, N and H under the names in GPT-2's configs."""
    D = config.number("n_embd", "hidden_size", default=768)
    N = config.number("n_head", "num_attention_heads", default=12)
    return D, N, config.divided(("n_embd", D), ("n_head", N))


def _block(config: Reading) -> Layout:
    _check_alone(config)
    return Layout(
        row("c_attn.weight", QKV_KERNELS, linear, packed, linear, heads),
        row("c_attn.bias", QKV_BIASES, packed, heads),
        row("c_proj.weight", "out_proj.kernel", heads_in),
        row("c_proj.bias", "out_proj.bias"),
        ignored("bias", "the causal mask, which only old files contain"),
        ignored("masked_bias", "the fill value of masked scores, which only old files contain"),
    )


def _traits(config: Reading, prefix: str) -> Traits:
    D, N, H = _sizes(config)
    scale = H**-0.5 if config.flag("scale_attn_weights", default=True) else 1.0
    if config.flag("scale_attn_by_inverse_layer_idx", default=False):
        scale /= int(prefix.split(".")[-2]) + 1
    return Traits(D, Sizes(N, N, H), is_causal=True, scale=scale)


def _model(config: Reading, attention: tuple[Traits, ...], *, between: str) -> ModelTraits:
    """Return the traits of a model. between: the default activation."""
    D, _, _ = _sizes(config)
    norm = NormTraits("layer", config.real("layer_norm_epsilon", default=1e-5))
    rows = config.number("n_positions", "max_position_embeddings", default=1024)
    vocabulary = config.number("vocab_size", default=50257)
    width = config.number("n_inner", default=4 * D)
    mlp = MLPTraits(width, activation(config, "activation_function", between))
    embedding = EmbeddingTraits(vocabulary, width=D, positions=PositionTraits(rows))
    return decoder(config, D, embedding, stacked(attention, mlp, norm, "pre"), norm, tied=True)


GPT2 = Family(
    *("gpt2", _block, partial(_rest, _CONV1D), _head, _traits),
    places=(Prefixes("h.{layer}.attn"),),
    model_of=partial(_model, between="gelu_new"),
)


# --- GPTBigCode ---------------------------------------------------------------------------------


def _is_multi_query(config: Reading) -> bool:
    return config.flag("multi_query", default=True)


def _bigcode_block(config: Reading) -> Layout:
    _check_alone(config)
    return fused("c_attn", "c_proj", by_head=not _is_multi_query(config))


def _bigcode_traits(config: Reading, prefix: str) -> Traits:
    D, N, H = _sizes(config)
    K = 1 if _is_multi_query(config) else N
    if (value := config.number("num_key_value_heads", default=K)) != K:
        config.refuse("num_key_value_heads", value, f"{K}, by multi_query")
    scale = None if config.flag("scale_attn_weights", default=True) else 1.0
    return Traits(D, Sizes(N, K, H), is_causal=True, scale=scale)


GPT_BIGCODE = replace(
    GPT2,
    name="gpt_bigcode",
    block_of=_bigcode_block,
    rest_of=partial(_rest, LINEAR),
    traits_of=_bigcode_traits,
    model_of=partial(_model, between="gelu_pytorch_tanh"),
)
