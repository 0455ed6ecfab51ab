"""Gemma 2 and the text models of Gemma 3: norms before and after attention and MLP.

Gemma 2 has softcaps, and a window in every other layer. Gemma 3 has norms of queries and keys in
their place, a window in five layers of six, and other rotary frequencies in those.
"""

from collections.abc import Mapping
from functools import partial

from jax_attn.families.config import FULL, LAYER_KINDS, SLIDES, Reading
from jax_attn.families.decoders import FREQUENCIES, heads, rotary
from jax_attn.families.family import Family, Prefixes
from jax_attn.families.traits import (
    EmbeddingTraits,
    MLPTraits,
    ModelTraits,
    NormTraits,
    RotaryTraits,
    Traits,
)
from jax_attn.families.whole import activation, decoder, padding, stacked
from jax_attn.transfer import EMBEDDING, Layout, Sizes
from jax_attn.transfer.table.layouts import BIASLESS, RMS_NORM, projections

_SHARED = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_DEFAULTS = {
    "gemma2": _SHARED
    | {
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": _SHARED | {"vocab_size": 262208, "max_position_embeddings": 131072},
}
"""transformers' defaults for missing keys; null counts as present."""

_BASES = {SLIDES: ("rope_local_base_freq", 1e4), FULL: ("rope_theta", 1e6)}
"""A kind of Gemma 3's layers -> the name of its rotary base in old configs, and the default."""

_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_out_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_out_norm",
}


def _block(config: Reading) -> Layout:
    norms = (RMS_NORM.under(norm, norm) for norm in ("q_norm", "k_norm"))
    return Layout(
        projections("q_proj", "k_proj", "v_proj", "o_proj"),
        *(norms if _is_third(config) else ()),
        FREQUENCIES,
    )


def _is_third(config: Reading) -> bool:
    return config.get("model_type") == "gemma3_text"


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
    config, is_third = config.over(_DEFAULTS[config.get("model_type")]), _is_third(config)
    if both_ways := config.get("use_bidirectional_attention"):
        config.refuse("use_bidirectional_attention", both_ways, "false")
    softcap = config.real("attn_logit_softcapping", default=None)
    if is_third and softcap is not None:
        config.refuse("attn_logit_softcapping", softcap, "null, as transformers does not apply it")
    N, H = config.number("num_attention_heads"), config.number("head_dim")
    has_bias, slides = config.flag("attention_bias"), _slides(config, int(prefix.split(".")[-2]))
    width = config.number("sliding_window", default=None)
    return Traits(
        config.number("hidden_size"),
        Sizes(N, config.kv_heads("num_key_value_heads", "num_attention_heads"), H),
        use_bias=has_bias,
        use_out_bias=has_bias,
        is_causal=True,
        scale=config.real("query_pre_attn_scalar") ** -0.5,
        softcap=softcap,
        window=width if slides else None,
        qk_norm=_norm(config) if is_third else None,
        rotary=_of_each_kind(config, H)[SLIDES if slides else FULL]
        if is_third
        else rotary(config, H),
    )


def _slides(config: Reading, layer: int) -> bool:
    """Return whether a layer has a window, by layer_types or, without these, all but every n-th."""
    every = config.number("sliding_window_pattern", default=6) if _is_third(config) else 2
    count = config.number("num_hidden_layers", default=None, least=0)
    kinds = config.words("layer_types", LAYER_KINDS, count)
    return (layer + 1) % every != 0 if kinds is None else SLIDES in kinds[layer : layer + 1]


def _of_each_kind(config: Reading, head_dim: int) -> dict[str, RotaryTraits]:
    """Return the rotary positions of each kind of layers; rope_scaling is that of full ones."""
    new, each = config.inside("rope_parameters"), dict[str, RotaryTraits]()
    if new.config.keys() - set(LAYER_KINDS):
        expected = f"an object for each of {', '.join(LAYER_KINDS)}"
        config.refuse("rope_parameters", new.config, expected)
    for kind, (name, base) in _BASES.items():
        old = config.get("rope_scaling") if kind == FULL else None
        if isinstance(old, Mapping) and "type" in old and "rope_type" not in old:
            expected = "a rope_type: by a type, some versions of transformers scale nothing"
            config.refuse("rope_scaling", old, expected)
        own = {"rope_parameters": new.inside(kind).config, "rope_scaling": old}
        names = (name, "partial_rotary_factor")
        each[kind] = rotary(config.with_values(own), head_dim, names=names, base=base)
    return each


def _norm(config: Reading) -> NormTraits:
    return NormTraits("rms", config.real("rms_norm_eps"), adds_one=True)


def _model(config: Reading, attention: tuple[Traits, ...]) -> ModelTraits:
    config = config.over(_DEFAULTS[config.get("model_type")])
    D, vocabulary = config.number("hidden_size"), config.number("vocab_size")
    norm = _norm(config)
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


GEMMA = Family(
    *("gemma2", _block, _rest, partial(heads, embedding="model.embed_tokens.weight"), _traits),
    places=(Prefixes("layers.{layer}.self_attn"),),
    roots=("model", "transformer", ""),
    also=("gemma3_text",),
    model_of=_model,
)
