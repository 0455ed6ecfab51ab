"""Llama, Mistral, Qwen2 and Qwen3: grouped heads, rotary positions, no table of positions."""

from jax_attn.transfer.families.config import flag, number, real
from jax_attn.transfer.families.family import Config, Family, NormTraits, Place, Traits
from jax_attn.transfer.families.rope import rotary
from jax_attn.transfer.layout import Layout
from jax_attn.transfer.layouts import EMBEDDING, FROM_HEADS, LAYER_NORM, LINEAR, TO_HEADS
from jax_attn.transfer.rows import ignored, tied
from jax_attn.transfer.steps import Sizes

_HAS_BIAS = {"qwen2": (True, False)}
"""Of q, k, v and of the output, where no attention_bias says."""


def _block(config: Config) -> Layout:
    return Layout(
        TO_HEADS.under("q_proj", "q_proj"),
        TO_HEADS.under("k_proj", "k_proj"),
        TO_HEADS.under("v_proj", "v_proj"),
        FROM_HEADS.under("o_proj", "out_proj"),
        LAYER_NORM.under("q_norm", "q_norm"),
        LAYER_NORM.under("k_norm", "k_norm"),
        ignored("rotary_emb.inv_freq", "frequencies, worked out from the config"),
    )


def _rest(config: Config) -> Layout:
    layer = "layers.{layer}"
    return Layout(
        EMBEDDING.under("embed_tokens", "token_embedding"),
        LAYER_NORM.under(f"{layer}.input_layernorm", f"{layer}.attention_norm"),
        LAYER_NORM.under(f"{layer}.post_attention_layernorm", f"{layer}.mlp_norm"),
        LINEAR.under(f"{layer}.mlp.up_proj", f"{layer}.mlp.up"),
        LINEAR.under(f"{layer}.mlp.gate_proj", f"{layer}.mlp.gate"),
        LINEAR.under(f"{layer}.mlp.down_proj", f"{layer}.mlp.down"),
        LAYER_NORM.under("norm", "final_norm"),
        ignored("rotary_emb.inv_freq", "frequencies, worked out from the config"),
    )


def _head(config: Config) -> Layout:
    if flag(config, "tie_word_embeddings", default=False):
        return Layout(tied("lm_head.weight", "model.embed_tokens.weight"))
    return LINEAR.under("lm_head", "lm_head")


def _traits(config: Config, prefix: str) -> Traits:
    D, N = number(config, "hidden_size"), number(config, "num_attention_heads")
    K = number(config, "num_key_value_heads", default=N)
    H = number(config, "head_dim", default=D // N)
    kind = config.get("model_type")
    both = flag(config, "attention_bias", default=False)
    use_bias, use_out_bias = _HAS_BIAS.get(kind, (both, both))
    epsilon = real(config, "rms_norm_eps", default=1e-6)
    return Traits(
        D,
        Sizes(N, K, H),
        use_bias=use_bias,
        use_out_bias=use_out_bias,
        is_causal=True,
        window=_window(config, int(prefix.split(".")[-2])),
        qk_norm=NormTraits("rms", epsilon) if kind == "qwen3" else None,
        rotary=rotary(config, H),
    )


def _window(config: Config, layer: int) -> int | None:
    kinds = config.get("layer_types")
    if kinds and kinds[layer] != "sliding_attention":
        return None
    return number(config, "sliding_window", default=None)


LLAMA = Family(
    name="llama",
    model_types=("llama", "mistral", "qwen2", "qwen3"),
    roots=("model", ""),
    places=(Place("layers.{layer}.self_attn", "layers.{layer}.attention"),),
    block=_block,
    rest=_rest,
    head=_head,
    traits=_traits,
)
