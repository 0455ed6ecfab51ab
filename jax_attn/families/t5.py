"""T5, mT5 and UMT5: an encoder and a decoder, no scale, a learned bias by distance.

The first block of each side has the table of buckets, and the others receive its bias. In UMT5
every block has its own table.
"""

import re

from jax_attn.families.config import Reading
from jax_attn.families.family import Family, Prefixes
from jax_attn.families.traits import BiasTraits, Traits
from jax_attn.transfer import EMBEDDING, LINEAR, Layout, Sizes, either, ignored, linear, row, tied
from jax_attn.transfer.table.layouts import BIASLESS, RMS_NORM, projections

_SELF, _CROSS = "layer.0.SelfAttention", "layer.1.EncDecAttention"
_HEADS = {"t5": 8}
"""model_type -> N if the config lacks it; 6 for the others."""

_MLP = Layout(
    either(
        (row("wi_0.weight", "gate.kernel", linear), row("wi_1.weight", "up.kernel", linear)),
        row("wi.weight", "up.kernel", linear),
    ),
    BIASLESS.under("wo", "down"),
)


def _block(config: Reading) -> Layout:
    return Layout(
        projections("q", "k", "v", "o"), EMBEDDING.under("relative_attention_bias", "position_bias")
    )


def _rest(config: Reading) -> Layout:
    return Layout(
        EMBEDDING.under("shared", "token_embedding"),
        tied("encoder.embed_tokens.weight", "shared.weight"),
        tied("decoder.embed_tokens.weight", "shared.weight"),
        _stack("attention_norm", "mlp_norm").under("encoder", "encoder"),
        _stack("attention_norm", "cross_attention_norm", "mlp_norm").under("decoder", "decoder"),
        ignored(
            f"decoder.block.0.{_CROSS}.relative_attention_bias.weight",
            "unused: cross-attention has no bias",
        ),
    )


def _stack(*norms: str) -> Layout:
    """Return the table of a side's MLPs and norms; norms: their Flax names, the MLP's last."""
    block, layer = "block.{layer}", "layers.{layer}"
    last = len(norms) - 1
    return Layout(
        *(
            RMS_NORM.under(f"{block}.layer.{i}.layer_norm", f"{layer}.{name}")
            for i, name in enumerate(norms)
        ),
        _MLP.under(f"{block}.layer.{last}.DenseReluDense", f"{layer}.mlp"),
        RMS_NORM.under("final_layer_norm", "final_norm"),
    )


def _head(config: Reading) -> Layout:
    # transformers 5 writes tie_word_embeddings = true for every T5, and keeps in
    # scale_decoder_outputs whether the head of the original file was tied.
    is_tied = config.flag("tie_word_embeddings", default=True)
    is_tied = config.flag("scale_decoder_outputs", default=is_tied)
    return Layout(
        tied("lm_head.weight", "shared.weight")
        if is_tied
        else BIASLESS.under("lm_head", "lm_head"),
        LINEAR.under("classification_head.dense", "classifier.dense"),
        LINEAR.under("classification_head.out_proj", "classifier.out"),
        LINEAR.under("classifier", "token_classifier"),
        LINEAR.under("qa_outputs", "qa_outputs"),
    )


def _traits(config: Reading, prefix: str) -> Traits:
    kind = config.get("model_type")
    D = config.number("d_model", "hidden_size", default=512)
    N = config.number("num_heads", "num_attention_heads", default=_HEADS.get(kind, 6))
    H = config.number("d_kv", "head_dim", default=64)
    in_decoder, cross = ".decoder." in f".{prefix}", prefix.endswith(_CROSS)
    buckets = {
        "buckets": config.number("relative_attention_num_buckets", default=32),
        "max_distance": config.number("relative_attention_max_distance", default=128),
        "bidirectional": not in_decoder,
    }
    holds_table = not cross and (kind == "umt5" or ".block.0." in prefix)
    return Traits(
        D,
        Sizes(N, N, H),
        use_bias=False,
        use_out_bias=False,
        is_causal=in_decoder and not cross,
        cross=cross,
        scale=1.0,
        bias=BiasTraits("relative", buckets) if holds_table else None,
        lender="" if holds_table or cross else re.sub(r"\bblock\.\d+\.", "block.0.", prefix),
    )


T5 = Family(
    *("t5", _block, _rest, _head, _traits),
    places=(
        Prefixes(f"encoder.block.{{layer}}.{_SELF}", "encoder.layers.{layer}.attention"),
        Prefixes(f"decoder.block.{{layer}}.{_SELF}", "decoder.layers.{layer}.attention"),
        Prefixes(f"decoder.block.{{layer}}.{_CROSS}", "decoder.layers.{layer}.cross_attention"),
    ),
    roots=("", "transformer"),
    also=("mt5", "umt5"),
)
