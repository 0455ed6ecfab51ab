"""GPT-NeoX and Pythia: query, key and value interleaved by head; rotary on a part of each head."""

from jax_attn.families.config import Reading
from jax_attn.families.decoders import FREQUENCIES, TASKS, mlp, norms, rotary
from jax_attn.families.family import Family, Prefixes
from jax_attn.families.traits import EmbeddingTraits, MLPTraits, ModelTraits, NormTraits, Traits
from jax_attn.families.whole import activation, decoder, stacked
from jax_attn.transfer import (
    EMBEDDING,
    LAYER_NORM,
    Layout,
    Sizes,
    either,
    ignored,
    linear,
    row,
    tied,
)
from jax_attn.transfer.table.layouts import fused

_DEFAULTS = {
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "max_position_embeddings": 2048,
    "attention_bias": True,
}
_MASK = "the causal mask, which is computed instead"


def _block(config: Reading) -> Layout:
    return Layout(
        fused("query_key_value", "dense", by_head=True),
        ignored("bias", _MASK),
        ignored("masked_bias", _MASK),
        FREQUENCIES,
    )


def _rest(config: Reading) -> Layout:
    return Layout(
        EMBEDDING.under("embed_in", "token_embedding"),
        (norms() + mlp()).under("layers.{layer}", "layers.{layer}"),
        LAYER_NORM.under("final_layer_norm", "final_norm"),
        FREQUENCIES,
    )


def _head(config: Reading) -> Layout:
    """Return the table of the heads; files call the first embed_out, live modules lm_head."""
    keys = "embed_out.weight", "lm_head.weight"
    is_tied = config.flag("tie_word_embeddings", default=False)
    return Layout(
        *(
            (tied(key, "gpt_neox.embed_in.weight") for key in keys)
            if is_tied
            else [either(*(row(key, "lm_head.kernel", linear) for key in keys))]
        ),
        TASKS,
    )


def _traits(config: Reading, prefix: str) -> Traits:
    config = config.over(_DEFAULTS)
    D, N, H = config.share("hidden_size", "num_attention_heads")
    has_bias = config.flag("attention_bias")
    return Traits(
        D,
        Sizes(N, N, H),
        use_bias=has_bias,
        use_out_bias=has_bias,
        is_causal=True,
        rotary=rotary(config, H, part=0.25, names=("rotary_emb_base", "rotary_pct")),
    )


def _model(config: Reading, attention: tuple[Traits, ...]) -> ModelTraits:
    D = config.number("hidden_size", default=_DEFAULTS["hidden_size"])
    norm = NormTraits("layer", config.real("layer_norm_eps", default=1e-5))
    width = config.number("intermediate_size", default=24576)
    mlp = MLPTraits(width, activation(config, "hidden_act", "gelu"))
    is_parallel = config.flag("use_parallel_residual", default=True)
    embedding = EmbeddingTraits(config.number("vocab_size", default=50432), width=D)
    blocks = stacked(attention, mlp, norm, "parallel" if is_parallel else "pre")
    return decoder(config, D, embedding, blocks, norm, tied=False)


GPT_NEOX = Family(
    *("gpt_neox", _block, _rest, _head, _traits),
    places=(Prefixes("layers.{layer}.attention"),),
    roots=("gpt_neox", ""),
    model_of=_model,
)
