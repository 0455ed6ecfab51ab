"""Phi: attention and MLP in parallel after one norm, rotary on a part of each head."""

from jax_attn.families.config import Reading
from jax_attn.families.decoders import FREQUENCIES, TASKS, rotary, sizes
from jax_attn.families.family import Family, Prefixes
from jax_attn.families.traits import EmbeddingTraits, MLPTraits, ModelTraits, NormTraits, Traits
from jax_attn.families.whole import activation, decoder, padding, stacked
from jax_attn.transfer import EMBEDDING, LAYER_NORM, LINEAR, Layout, Sizes, row, tied
from jax_attn.transfer.table.layouts import projections

_DEFAULTS = {
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "qk_layernorm": False,
}


def _block(config: Reading) -> Layout:
    names = {"q_layernorm": "q_norm", "k_layernorm": "k_norm"}
    has_norms = config.over(_DEFAULTS).flag("qk_layernorm")
    norms = (LAYER_NORM.under(*pair) for pair in names.items()) if has_norms else ()
    return Layout(projections("q_proj", "k_proj", "v_proj", "dense"), *norms, FREQUENCIES)


def _rest(config: Reading) -> Layout:
    layer = "layers.{layer}"
    return Layout(
        EMBEDDING.under("embed_tokens", "token_embedding"),
        LAYER_NORM.under(f"{layer}.input_layernorm", f"{layer}.attention_norm"),
        LINEAR.under(f"{layer}.mlp.fc1", f"{layer}.mlp.up"),
        LINEAR.under(f"{layer}.mlp.fc2", f"{layer}.mlp.down"),
        LAYER_NORM.under("final_layernorm", "final_norm"),
    )


def _head(config: Reading) -> Layout:
    """Return the table of the heads: Phi's language-model head has a bias, tied or not."""
    if not config.flag("tie_word_embeddings", default=False):
        return Layout(LINEAR.under("lm_head", "lm_head"), TASKS)
    same = tied("lm_head.weight", "model.embed_tokens.weight")
    return Layout(same, row("lm_head.bias", "lm_head.bias"), TASKS)


def _traits(config: Reading, prefix: str) -> Traits:
    config = config.over(_DEFAULTS)
    D, N, H = sizes(config)
    has_norms = config.flag("qk_layernorm")
    if has_norms and H * N != D:
        expected = "hidden_size / num_attention_heads with qk_layernorm"
        config.refuse("head_dim", H, expected, D, N)
    norm = NormTraits("layer", config.real("layer_norm_eps"))
    return Traits(
        D,
        Sizes(N, config.kv_heads("num_key_value_heads", "num_attention_heads"), H),
        is_causal=True,
        qk_norm=norm if has_norms else None,
        rotary=rotary(config, H, part=0.5),
    )


def _model(config: Reading, attention: tuple[Traits, ...]) -> ModelTraits:
    config = config.over(_DEFAULTS)
    D, vocabulary = config.number("hidden_size"), config.number("vocab_size")
    norm = NormTraits("layer", config.real("layer_norm_eps"))
    mlp = MLPTraits(
        config.number("intermediate_size"), activation(config, "hidden_act", "gelu_new")
    )
    embedding = EmbeddingTraits(vocabulary, width=D, pad=padding(config, vocabulary))
    blocks = stacked(attention, mlp, norm, "parallel", shares_norm=True)
    return decoder(config, D, embedding, blocks, norm, tied=False, use_bias=True)


PHI = Family(
    *("phi", _block, _rest, _head, _traits),
    places=(Prefixes("layers.{layer}.self_attn"),),
    roots=("model", "transformer", ""),
    model_of=_model,
)
