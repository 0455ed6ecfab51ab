"""Gemma 2: norms before and after attention and MLP, softcaps, a window in every other layer."""

from functools import partial

from jax_attn.families.config import LAYER_KINDS, SLIDES, Reading
from jax_attn.families.decoders import FREQUENCIES, heads, rotary
from jax_attn.families.family import Family, Prefixes
from jax_attn.families.traits import EmbeddingTraits, MLPTraits, ModelTraits, NormTraits, Traits
from jax_attn.families.whole import activation, decoder, padding, stacked
from jax_attn.transfer import EMBEDDING, Layout, Sizes
from jax_attn.transfer.table.layouts import BIASLESS, RMS_NORM, projections

_DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
"""transformers' defaults for missing keys; null counts as present."""

_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_out_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_out_norm",
}


def _block(config: Reading) -> Layout:
    return projections("q_proj", "k_proj", "v_proj", "o_proj") + FREQUENCIES


def _rest(config: Reading) -> Layout:
    layer = "layers.{layer}"
    dense = {f"{name}_proj": name for name in ("up", "gate", "down")}
    return Layout(
        EMBEDDING.under("embed_tokens", "token_embedding"),
        *(RMS_NORM.under(f"{layer}.{key}", f"{layer}.{path}") for key, path in _NORMS.items()),
        *(BIASLESS.under(f"{layer}.mlp.{k}", f"{layer}.mlp.{path}") for k, path in dense.items()),
        RMS_NORM.under("norm", "final_norm"),
        FREQUENCIES,
    )


def _traits(config: Reading, prefix: str) -> Traits:
    config = config.over(_DEFAULTS)
    if config.get("use_bidirectional_attention"):
        config.refuse("use_bidirectional_attention", True, "false")
    N, H = config.number("num_attention_heads"), config.number("head_dim")
    has_bias = config.flag("attention_bias")
    return Traits(
        config.number("hidden_size"),
        Sizes(N, config.kv_heads("num_key_value_heads", "num_attention_heads"), H),
        use_bias=has_bias,
        use_out_bias=has_bias,
        is_causal=True,
        scale=config.real("query_pre_attn_scalar") ** -0.5,
        softcap=config.real("attn_logit_softcapping", default=None),
        window=_window(config, int(prefix.split(".")[-2])),
        rotary=rotary(config, H),
    )


def _window(config: Reading, layer: int) -> int | None:
    """Return the window, by layer_types or, without these, in layers 0, 2, 4, …."""
    width = config.number("sliding_window", default=None)
    count = config.number("num_hidden_layers", default=None, least=0)
    kinds = config.words("layer_types", LAYER_KINDS, count)
    slides = layer % 2 == 0 if kinds is None else SLIDES in kinds[layer : layer + 1]
    return width if slides else None


def _model(config: Reading, attention: tuple[Traits, ...]) -> ModelTraits:
    config = config.over(_DEFAULTS)
    D, vocabulary = config.number("hidden_size"), config.number("vocab_size")
    norm = NormTraits("rms", config.real("rms_norm_eps"), adds_one=True)
    between = activation(config, "hidden_activation", "gelu_pytorch_tanh")
    if config.get("hidden_act") and activation(config, "hidden_act", "gelu") != between:
        config.refuse("hidden_act", config.get("hidden_act"), "the same as hidden_activation")
    mlp = MLPTraits(
        config.number("intermediate_size"),
        between,
        is_gated=True,
        use_bias=False,
    )
    softcap = config.real("final_logit_softcapping", default=None)
    pad = padding(config, vocabulary, 0)
    embedding = EmbeddingTraits(vocabulary, width=D, scale=D**0.5, pad=pad)
    blocks = stacked(attention, mlp, norm, "sandwich")
    return decoder(config, D, embedding, blocks, norm, tied=True, softcap=softcap)


GEMMA2 = Family(
    *("gemma2", _block, _rest, partial(heads, embedding="model.embed_tokens.weight"), _traits),
    places=(Prefixes("layers.{layer}.self_attn"),),
    roots=("model", "transformer", ""),
    model_of=_model,
)
