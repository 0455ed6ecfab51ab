"""ViT: an encoder of patches. Files and live modules use different keys; both are supported."""

from jax_attn.families.config import Reading
from jax_attn.families.family import Family, Prefixes
from jax_attn.families.traits import Traits
from jax_attn.transfer import LAYER_NORM, LINEAR, Layout, Sizes, conv, row, spellings
from jax_attn.transfer.table.layouts import projections

_CONV = Layout(row("weight", "kernel", conv), row("bias", "bias"))
_FILE, _LIVE, _OURS = "encoder.layer.{layer}", "layers.{layer}", "layers.{layer}"


def _spelled(table: Layout, file: str, live: str, flax: str) -> Layout:
    return spellings(table.under(file, flax), table.under(live, flax))


def _block(config: Reading) -> Layout:
    return spellings(
        projections("attention.query", "attention.key", "attention.value", "output.dense"),
        projections("q_proj", "k_proj", "v_proj", "o_proj"),
    )


def _rest(config: Reading) -> Layout:
    before, after = "layernorm_before", "layernorm_after"
    return Layout(
        row("embeddings.cls_token", "cls_token"),
        row("embeddings.mask_token", "mask_token"),
        row("embeddings.position_embeddings", "position_embedding"),
        _CONV.under("embeddings.patch_embeddings.projection", "patch_embedding"),
        _spelled(LAYER_NORM, f"{_FILE}.{before}", f"{_LIVE}.{before}", f"{_OURS}.attention_norm"),
        _spelled(LAYER_NORM, f"{_FILE}.{after}", f"{_LIVE}.{after}", f"{_OURS}.mlp_norm"),
        _spelled(LINEAR, f"{_FILE}.intermediate.dense", f"{_LIVE}.mlp.fc1", f"{_OURS}.mlp.up"),
        _spelled(LINEAR, f"{_FILE}.output.dense", f"{_LIVE}.mlp.fc2", f"{_OURS}.mlp.down"),
        LAYER_NORM.under("layernorm", "final_norm"),
        LINEAR.under("pooler.dense", "pooler"),
    )


def _head(config: Reading) -> Layout:
    return Layout(LINEAR.under("classifier", "classifier"), _CONV.under("decoder.0", "decoder"))


def _traits(config: Reading, prefix: str) -> Traits:
    D = config.number("hidden_size", default=768)
    N = config.number("num_attention_heads", default=12)
    H = config.number("head_dim", default=None)
    H = H or config.divided(("hidden_size", D), ("num_attention_heads", N))
    return Traits(D, Sizes(N, N, H), use_bias=config.flag("qkv_bias", default=True))


VIT = Family(
    *("vit", _block, _rest, _head, _traits),
    places=(Prefixes(f"{_FILE}.attention"), Prefixes(f"{_LIVE}.attention")),
    roots=("vit", ""),
    optional_of=lambda config: ("mask_token", "pooler"),
)
