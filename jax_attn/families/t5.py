"""T5, mT5 and UMT5: an encoder and a decoder, no scale, a learned bias by distance.

The first block of each side has the table of buckets, and the others receive its bias. In UMT5
every block has its own table. The class T5EncoderModel is a model of one stack, the encoder, and
its Flax paths are those of any other encoder.
"""

import re
from collections.abc import Collection
from typing import Any, NamedTuple

from jax_attn.families.config import DECODER_LAYERS, LAYERS, Config, Reading
from jax_attn.families.family import Family, Prefixes
from jax_attn.families.traits import (
    BiasTraits,
    BlockTraits,
    ClassifierTraits,
    EmbeddingTraits,
    MLPTraits,
    ModelTraits,
    NormTraits,
    Traits,
    VocabularyTraits,
)
from jax_attn.families.whole import activation, architecture, stacked
from jax_attn.transfer import EMBEDDING, LINEAR, Layout, Sizes, ignored, tied
from jax_attn.transfer.table.layouts import BIASLESS, RMS_NORM, projections

_SELF, _CROSS = "layer.0.SelfAttention", "layer.1.EncDecAttention"
_ENCODER, _DECODER = "encoder.block.{layer}", "decoder.block.{layer}"


class _Absent(NamedTuple):
    """What transformers takes for a field that a config lacks, by model_type."""

    num_heads: int = 6
    d_ff: int = 1024
    vocab_size: int = 250112
    feed_forward_proj: str = "gated-gelu"


_ABSENT = {"t5": _Absent(8, 2048, 32128, "relu")}
"""model_type -> the defaults; `_Absent()` for the others."""

_MODELS = ("Model", "EncoderModel", "ForConditionalGeneration")
"""Endings of the classes that have a whole model here."""

_GATED = Layout(*(BIASLESS.under(*names) for names in (("wi_0", "gate"), ("wi_1", "up"))))
_PLAIN = BIASLESS.under("wi", "up")


def _block(config: Reading) -> Layout:
    return Layout(
        projections("q", "k", "v", "o"), EMBEDDING.under("relative_attention_bias", "position_bias")
    )


def _rest(config: Reading) -> Layout:
    config.flag("is_encoder_decoder", default=True)  # read, so it is no unknown field
    mlp = (_GATED if _is_gated(config) else _PLAIN) + BIASLESS.under("wo", "down")
    encoder = _stack(mlp, "attention_norm", "mlp_norm")
    tokens = Layout(
        EMBEDDING.under("shared", "token_embedding"),
        tied("encoder.embed_tokens.weight", "shared.weight"),
    )
    if is_alone(config):
        return tokens + encoder.under("encoder", "")
    return Layout(
        tokens,
        tied("decoder.embed_tokens.weight", "shared.weight"),
        encoder.under("encoder", "encoder"),
        _stack(mlp, "attention_norm", "cross_attention_norm", "mlp_norm").under(
            "decoder", "decoder"
        ),
        ignored(
            f"decoder.block.0.{_CROSS}.relative_attention_bias.weight",
            "unused: cross-attention has no bias",
        ),
    )


def _places(config: Reading) -> tuple[Prefixes, ...]:
    if is_alone(config):
        return (Prefixes(f"{_ENCODER}.{_SELF}"),)
    return (
        Prefixes(f"{_ENCODER}.{_SELF}", "encoder.layers.{layer}.attention"),
        Prefixes(f"{_DECODER}.{_SELF}", "decoder.layers.{layer}.attention"),
        Prefixes(f"{_DECODER}.{_CROSS}", "decoder.layers.{layer}.cross_attention"),
    )


def is_alone(config: Reading) -> bool:
    """Return whether a config is that of an encoder without a decoder."""
    return architecture(config).endswith("EncoderModel")


def _stack(mlp: Layout, *norms: str) -> Layout:
    """Return the table of a side's MLPs and norms; norms: their Flax names, the MLP's last."""
    block, layer = "block.{layer}", "layers.{layer}"
    last = len(norms) - 1
    return Layout(
        *(
            RMS_NORM.under(f"{block}.layer.{i}.layer_norm", f"{layer}.{name}")
            for i, name in enumerate(norms)
        ),
        mlp.under(f"{block}.layer.{last}.DenseReluDense", f"{layer}.mlp"),
        RMS_NORM.under("final_layer_norm", "final_norm"),
    )


def _is_tied(config: Reading) -> bool:
    return config.flag("tie_word_embeddings", default=True)


def _scales(config: Reading) -> bool:
    """Return whether the head reads scaled states, which transformers 5 says in a field."""
    scales = config.flag("scale_decoder_outputs", default=_is_tied(config))
    return scales and config.get("model_type") != "mt5"


def _settled(config: Config, keys: Collection[str]) -> Config:
    """Return the config with a head of its own if the file has one and states are not scaled.

    transformers 5 writes tie_word_embeddings = true for every T5. Where states are scaled, a file
    may have the tied weight twice, and the config is believed.
    """
    has_own = config.get("scale_decoder_outputs") is False and "lm_head.weight" in keys
    return {**config, "tie_word_embeddings": False} if has_own else config


def _head(config: Reading) -> Layout:
    _scales(config)  # read, so that a wrong value is named with the others
    return Layout(
        tied("lm_head.weight", "shared.weight")
        if _is_tied(config)
        else BIASLESS.under("lm_head", "lm_head"),
        LINEAR.under("classification_head.dense", "classifier.dense"),
        LINEAR.under("classification_head.out_proj", "classifier.out"),
        LINEAR.under("classifier", "token_classifier"),
        LINEAR.under("qa_outputs", "qa_outputs"),
    )


def _traits(config: Reading, prefix: str) -> Traits:
    kind = config.get("model_type")
    D = config.number("d_model", "hidden_size", default=512)
    N = config.number("num_heads", "num_attention_heads", default=_absent(config).num_heads)
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


def _absent(config: Reading) -> _Absent:
    return _ABSENT.get(config.get("model_type"), _Absent())


def _projection(config: Reading) -> Any:
    return config.get("feed_forward_proj") or _absent(config).feed_forward_proj


def _is_gated(config: Reading) -> bool:
    return str(_projection(config)).split("-")[0] == "gated"


def _mlp(config: Reading) -> MLPTraits:
    is_gated, named = _is_gated(config), _projection(config)
    parts = named.split("-") if isinstance(named, str) else []
    if len(parts) != 1 + is_gated:
        expected = "the name of an activation, or of a gated one such as 'gated-gelu'"
        config.refuse("feed_forward_proj", named, expected)
        parts = ["relu"]
    # By this name transformers means the approximate one, which it calls gelu_new.
    function = "gelu_new" if named == "gated-gelu" else parts[-1]
    # Files of transformers repeat it in two other fields, which its models read.
    for name, same in {"dense_act_fn": function, "is_gated_act": is_gated}.items():
        if (value := config.get(name)) not in (None, same):
            config.refuse(name, value, f"{same!r}, as feed_forward_proj says")
    by_name = config.with_values({"feed_forward_proj": function})
    return MLPTraits(
        config.number("d_ff", default=_absent(config).d_ff),
        activation(by_name, "feed_forward_proj", "relu"),
        is_gated=is_gated,
        use_bias=False,
    )


def _model(config: Reading, attention: tuple[Traits, ...]) -> ModelTraits:
    _check_class(config)
    D = config.number("d_model", "hidden_size", default=512)
    vocabulary = config.number("vocab_size", default=_absent(config).vocab_size)
    norm = NormTraits("rms", config.real("layer_norm_epsilon", default=1e-6))
    # None of these is read by transformers: a T5 has no table of positions.
    for name in ("n_positions", "scalable_attention"):
        config.get(name)
    head = VocabularyTraits(_is_tied(config), scale=D**-0.5 if _scales(config) else None)
    mlp = _mlp(config)
    return ModelTraits(
        D,
        EmbeddingTraits(vocabulary, width=D),
        stacked(attention, mlp, norm, "pre"),
        norm,
        head,
        ClassifierTraits("first"),
        decoder=_decoder(config, len(attention), mlp, norm),
    )


def _decoder(
    config: Reading, layers: int, mlp: MLPTraits, norm: NormTraits
) -> tuple[BlockTraits, ...]:
    """Return the decoder's blocks, if the traits are those of all `layers` of the encoder."""
    count = config.number(*LAYERS)
    others = config.number(*DECODER_LAYERS, default=count)
    if is_alone(config) or layers != count:
        return ()
    return tuple(
        BlockTraits(
            *(_traits(config, f"{block}.{_SELF}"), mlp, norm, "pre"),
            cross=_traits(config, f"{block}.{_CROSS}"),
        )
        for block in (_DECODER.format(layer=layer) for layer in range(others))
    )


def _check_class(config: Reading) -> None:
    """Refuse the classes of the family that have no model here."""
    named = architecture(config)
    if named and not named.endswith(_MODELS):
        config.refuse("architectures", named, f"a class that ends in {', '.join(_MODELS)}")
    # An encoder's file may say either: transformers has written both.
    has_both = config.flag("is_encoder_decoder", default=True)
    if not has_both and not is_alone(config):
        config.refuse("is_encoder_decoder", has_both, "true, except for the class T5EncoderModel")


T5 = Family(
    *("t5", _block, _rest, _head, _traits),
    places=_places,
    roots=("", "transformer"),
    also=("mt5", "umt5"),
    model_of=_model,
    settled=_settled,
)
