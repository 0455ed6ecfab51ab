"""Llama, Mistral, Mixtral, Qwen2 and Qwen3: grouped heads, rotary positions, no table of positions.

Llama is also read as Meta publishes it: consolidated.*.pth with a params.json. There, rotary pairs
are adjacent, (2m, 2m + 1); the tables reorder them to halves, (m, m + H/2). The Flax side is that
of transformers' Llama, so the two tables convert either format to the other.
"""

from functools import partial

from jax_attn.families import experts
from jax_attn.families.config import LAYER_KINDS, SLIDES, Reading
from jax_attn.families.decoders import FREQUENCIES, FROM_CONFIG, heads, norms, rotary, sizes
from jax_attn.families.family import Family, Prefixes
from jax_attn.families.traits import (
    EmbeddingTraits,
    MLPTraits,
    ModelTraits,
    NormTraits,
    RotaryTraits,
    Traits,
)
from jax_attn.families.whole import activation, architecture, decoder, padding, stacked
from jax_attn.transfer import EMBEDDING, LINEAR, Layout, Sizes, ignored, to_half_split
from jax_attn.transfer.table.layouts import BIASLESS, RMS_NORM, projections

_SHARED = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
}
_QWEN = _SHARED | {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DEFAULTS = {
    "llama": _SHARED,
    "mistral": _SHARED
    | {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    "mixtral": _SHARED
    | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "qwen3_moe": _QWEN | {"hidden_size": 2048, "num_key_value_heads": 4},
}
"""transformers' defaults for missing keys; null counts as present."""

_HEAD = partial(heads, embedding="model.embed_tokens.weight", tied_by_default=False)
_BIASES = {"mistral": (False, False), "mixtral": (False, False), "qwen2": (True, False)}
"""model_type -> whether q, k, v and the output have biases if attention_bias does not decide."""


def _block(config: Reading) -> Layout:
    norms = (RMS_NORM.under(norm, norm) for norm in ("q_norm", "k_norm"))
    return Layout(
        projections("q_proj", "k_proj", "v_proj", "o_proj"),
        *(norms if _has_qk_norm(config) else ()),
        FREQUENCIES,
    )


def _rest(config: Reading) -> Layout:
    dense, layer = LINEAR if _has_mlp_bias(config) else BIASLESS, "layers.{layer}"
    of_mlp = (dense.under(f"mlp.{name}_proj", f"mlp.{name}") for name in ("up", "gate", "down"))
    mlp = experts.table(config) if _has_experts(config) else Layout(*of_mlp)
    return Layout(
        EMBEDDING.under("embed_tokens", "token_embedding"),
        Layout(norms(RMS_NORM), mlp).under(layer, layer),
        RMS_NORM.under("norm", "final_norm"),
        FREQUENCIES,
    )


def _has_experts(config: Reading) -> bool:
    return config.get("model_type") in experts.SPELLED


def _has_mlp_bias(config: Reading) -> bool:
    has_bias = config.flag("mlp_bias", default=False)
    return has_bias and config.get("model_type") == "llama"


def _traits(config: Reading, prefix: str) -> Traits:
    kind = config.get("model_type")
    config = config.over(_DEFAULTS[kind])
    D, N, H = sizes(config)
    K = config.kv_heads("num_key_value_heads", "num_attention_heads")
    both = config.flag("attention_bias")
    use_bias, use_out_bias = _BIASES.get(kind, (both, both))
    norm = NormTraits("rms", config.real("rms_norm_eps"))
    return Traits(
        D,
        Sizes(N, K, H),
        use_bias=use_bias,
        use_out_bias=use_out_bias,
        is_causal=True,
        window=_WINDOWS[kind](config, int(prefix.split(".")[-2])),
        qk_norm=norm if _has_qk_norm(config) else None,
        rotary=rotary(config, H, base=1e6 if kind == "mixtral" else 1e4),
    )


def _has_qk_norm(config: Reading) -> bool:
    has_norm = config.get("model_type") in ("qwen3", "qwen3_moe")
    if has_norm and not config.flag("use_qk_norm", default=True):
        config.refuse("use_qk_norm", False, "true: this model_type has norms of queries and keys")
    return has_norm


def _some_layers(config: Reading, layer: int) -> int | None:
    """Return Qwen's window: in the layers of layer_types, else from max_window_layers on."""
    first = config.number("max_window_layers", least=0)
    width = config.number("sliding_window", default=None)
    count = config.number("num_hidden_layers", default=None, least=0)
    kinds = config.words("layer_types", LAYER_KINDS, count)
    used = config.flag("use_sliding_window")
    if used and kinds is not None and layer >= len(kinds):
        config.refuse("layer_types", kinds, f"a list that reaches layer {layer}")
    slides = layer >= first if kinds is None else SLIDES in kinds[layer : layer + 1]
    return width if used and slides else None


def _all_layers(config: Reading, layer: int) -> int | None:
    """Return the window of Qwen's experts, which every layer has or none.

    Files name max_window_layers, too, which transformers does not read.
    """
    config.number("max_window_layers", default=None, least=0)
    width = config.number("sliding_window", default=None)
    return width if config.flag("use_sliding_window") else None


_WINDOWS = {
    "llama": lambda config, layer: None,
    "mistral": lambda config, layer: config.number("sliding_window", default=None),
    "mixtral": lambda config, layer: config.number("sliding_window", default=None),
    "qwen2": _some_layers,
    "qwen3": _some_layers,
    "qwen3_moe": _all_layers,
}

_WIDTHS = {"llama": 11008, "mistral": 14336}
_VOCABULARIES = {"llama": 32000, "mistral": 32000, "mixtral": 32000}


def _model(config: Reading, attention: tuple[Traits, ...]) -> ModelTraits:
    kind = config.get("model_type")
    config = config.over(_DEFAULTS[kind])
    D, norm = config.number("hidden_size"), NormTraits("rms", config.real("rms_norm_eps"))
    width = config.number("intermediate_size", default=_WIDTHS.get(kind, 22016))
    mlp = MLPTraits(
        experts.width(config) if _has_experts(config) else width,
        activation(config, "hidden_act", "silu"),
        is_gated=True,
        use_bias=_has_mlp_bias(config),
        experts=experts.traits(config) if _has_experts(config) else None,
    )
    vocabulary = config.number("vocab_size", default=_VOCABULARIES.get(kind, 151936))
    embedding = EmbeddingTraits(vocabulary, width=D, pad=padding(config, vocabulary))
    return decoder(config, D, embedding, stacked(attention, mlp, norm, "pre"), norm, tied=False)


def _new_root(config: Reading) -> str:
    is_mistral = config.get("model_type") == "mistral"
    answers = architecture(config).endswith("ForQuestionAnswering")
    return "transformer" if answers and not is_mistral else "model"


LLAMA = Family(
    *("llama", _block, _rest, _HEAD, _traits),
    places=(Prefixes("layers.{layer}.self_attn"),),
    roots=("model", "transformer", ""),
    new_root=_new_root,
    also=("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"),
    model_of=_model,
)


# --- Llama as Meta publishes it -----------------------------------------------------------------

_SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 8192}
"""The scaling of use_scaled_rope, which is in Meta's code, not in params.json. transformers uses a
factor of 32 for Llama 3.2, whose params.json does not differ in this."""


def _meta_block(config: Reading) -> Layout:
    return Layout(
        projections("wq", "wk", "wv", "wo").through(to_half_split(), "q_proj", "k_proj"),
        ignored("inner_attention.rope.freqs", FROM_CONFIG),
    )


def _meta_rest(config: Reading) -> Layout:
    layer = "layers.{layer}"
    return Layout(
        EMBEDDING.under("tok_embeddings", "token_embedding"),
        RMS_NORM.under(f"{layer}.attention_norm", f"{layer}.attention_norm"),
        RMS_NORM.under(f"{layer}.ffn_norm", f"{layer}.mlp_norm"),
        BIASLESS.under(f"{layer}.feed_forward.w1", f"{layer}.mlp.gate"),
        BIASLESS.under(f"{layer}.feed_forward.w2", f"{layer}.mlp.down"),
        BIASLESS.under(f"{layer}.feed_forward.w3", f"{layer}.mlp.up"),
        RMS_NORM.under("norm", "final_norm"),
        ignored("rope.freqs", FROM_CONFIG),
    )


def _meta_head(config: Reading) -> Layout:
    return BIASLESS.under("output", "lm_head")


def _meta_traits(config: Reading, prefix: str) -> Traits:
    D, N, H = config.share("dim", "n_heads")
    K = config.kv_heads("n_kv_heads", "n_heads")
    scaling = ("Llama3", _SCALED) if config.flag("use_scaled_rope", default=False) else None
    return Traits(
        D,
        Sizes(N, K, H),
        use_bias=False,
        use_out_bias=False,
        is_causal=True,
        rotary=RotaryTraits(float(config.real("rope_theta", default=10000.0)), scaling=scaling),
    )


LLAMA_META = Family(
    *("llama-meta", _meta_block, _meta_rest, _meta_head, _meta_traits),
    places=(Prefixes("layers.{layer}.attention"),),
    roots=("",),
    known_by=("dim", "n_heads", "n_layers"),
)
"""If a checkpoint is several files, each has a part of every tensor; they are not merged here."""
