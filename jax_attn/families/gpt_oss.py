"""gpt-oss: sinks, windows in every other layer, and experts with biases and a clamped product."""

from functools import partial

from jax_attn.families import experts
from jax_attn.families.config import LAYER_KINDS, SLIDES, Reading
from jax_attn.families.decoders import FREQUENCIES, heads, norms, rotary, sizes
from jax_attn.families.family import Family, Prefixes
from jax_attn.families.traits import (
    EmbeddingTraits,
    ExpertTraits,
    MLPTraits,
    ModelTraits,
    NormTraits,
    SwigluTraits,
    Traits,
)
from jax_attn.families.whole import activation, decoder, padding, stacked
from jax_attn.transfer import EMBEDDING, LINEAR, Layout, Sizes, alternating, row
from jax_attn.transfer.table.layouts import RMS_NORM, projections

_DEFAULTS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "attention_bias": True,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
"""transformers' defaults for missing keys; null counts as present."""

_EXPERTS, _CHOSEN = 128, 4
"""How many experts there are, and how many a token is sent to, if a config does not say."""

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""transformers' rope_parameters for configs without any."""

_HEAD = partial(heads, embedding="model.embed_tokens.weight", tied_by_default=False)


def _block(config: Reading) -> Layout:
    return Layout(
        projections("q_proj", "k_proj", "v_proj", "o_proj"), row("sinks", "sinks"), FREQUENCIES
    )


def _rest(config: Reading) -> Layout:
    gate, up, down = (f"mlp.experts.{name}" for name in ("gate", "up", "down"))
    mlp = Layout(
        LINEAR.under("mlp.router", "mlp.router"),
        row("mlp.experts.gate_up_proj", (f"{gate}.kernel", f"{up}.kernel"), alternating),
        row("mlp.experts.gate_up_proj_bias", (f"{gate}.bias", f"{up}.bias"), alternating),
        row("mlp.experts.down_proj", f"{down}.kernel"),
        row("mlp.experts.down_proj_bias", f"{down}.bias"),
    )
    return Layout(
        EMBEDDING.under("embed_tokens", "token_embedding"),
        Layout(norms(RMS_NORM), mlp).under("layers.{layer}", "layers.{layer}"),
        RMS_NORM.under("norm", "final_norm"),
        FREQUENCIES,
    )


def _traits(config: Reading, prefix: str) -> Traits:
    config = config.over(_DEFAULTS)
    D, N, H = sizes(config)
    has_bias = config.flag("attention_bias")
    return Traits(
        D,
        Sizes(N, config.kv_heads("num_key_value_heads", "num_attention_heads"), H),
        use_bias=has_bias,
        use_out_bias=has_bias,
        is_causal=True,
        window=_window(config, int(prefix.split(".")[-2])),
        rotary=rotary(_with_rope(config), H, base=150000.0),
        sinks=True,
    )


def _with_rope(config: Reading) -> Reading:
    """Return the config with transformers' rotary positions if it names none."""
    said = config.get("rope_scaling") or config.get("rope_parameters")
    return config.with_values({"rope_parameters": _YARN}) if said is None else config


def _window(config: Reading, layer: int) -> int | None:
    """Return a layer's window: by layer_types or, without these, in every other layer."""
    count = config.number("num_hidden_layers", default=None, least=0)
    kinds = config.words("layer_types", LAYER_KINDS, count)
    slides = layer % 2 == 0 if kinds is None else SLIDES in kinds[layer : layer + 1]
    width = config.number("sliding_window", default=None)
    if slides and width is None:
        config.refuse("sliding_window", None, f"a whole number ≥ 1: layer {layer} has a window")
    return width if slides else None


def _model(config: Reading, attention: tuple[Traits, ...]) -> ModelTraits:
    config = config.over(_DEFAULTS)
    D, vocabulary = config.number("hidden_size"), config.number("vocab_size")
    norm = NormTraits("rms", config.real("rms_norm_eps"))
    between = activation(config, "hidden_act", "silu")
    if between != "silu":
        expected = "silu: the experts compute it whatever the config says"
        config.refuse("hidden_act", config.get("hidden_act"), expected)
    mlp = MLPTraits(
        config.number("intermediate_size"),
        between,
        is_gated=True,
        experts=_routing(config),
        swiglu=SwigluTraits(config.real("swiglu_alpha"), config.real("swiglu_limit")),
    )
    embedding = EmbeddingTraits(vocabulary, width=D, pad=padding(config, vocabulary))
    return decoder(config, D, embedding, stacked(attention, mlp, norm, "pre"), norm, tied=False)


def _routing(config: Reading) -> ExpertTraits:
    number = experts.count(config, _EXPERTS)
    chosen = experts.chosen(config, number, _CHOSEN)
    # Published configs have the same number under the name of the original code, too.
    config.number("num_experts_per_tok", "experts_per_token", default=chosen)
    return ExpertTraits(number, chosen, are_normalized=True)


GPT_OSS = Family(
    *("gpt_oss", _block, _rest, _HEAD, _traits),
    places=(Prefixes("layers.{layer}.self_attn"),),
    roots=("model", ""),
    model_of=_model,
)
