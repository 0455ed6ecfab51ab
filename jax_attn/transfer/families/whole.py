"""What is read alike out of the configs of whole models, whatever their family."""

from collections.abc import Iterable

from jax_attn.transfer.families.config import Reading
from jax_attn.transfer.families.traits import (
    ACTIVATIONS,
    BlockTraits,
    ClassifierTraits,
    MLPTraits,
    NormTraits,
    Placement,
    Traits,
    VocabularyTraits,
)

_UNSUPPORTED = {
    "quantization_config": "null: the weights are to be dequantized first",
    "num_experts": "null: mixtures of experts have no model here",
    "num_local_experts": "null: mixtures of experts have no model here",
    "pruned_heads": "null: every layer is to have all its heads",
    "add_cross_attention": "false: a model here attends to its own tokens alone",
    "is_encoder_decoder": "false: a model here attends to its own tokens alone",
}
"""Fields that no model here takes, unless they are null, false, 0 or empty."""


def check_supported(config: Reading) -> None:
    """Refuse, by name, what changes a model in ways that no traits tell."""
    for name, expected in _UNSUPPORTED.items():
        if value := config.get(name):
            config.refuse(name, value, expected)


def activation(config: Reading, name: str, default: str) -> str:
    """The activation that a config names, as `jax_attn.models` calls it."""
    named = default if config.get(name) is None else config.get(name)
    if not isinstance(named, str) or named not in ACTIVATIONS:
        config.refuse(name, named, f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[default]
    return ACTIVATIONS[named]


def stacked(
    attention: Iterable[Traits],
    mlp: MLPTraits,
    norm: NormTraits,
    placement: Placement,
    *,
    shares_norm: bool = False,
) -> tuple[BlockTraits, ...]:
    """Blocks that differ in their attention alone."""
    return tuple(BlockTraits(each, mlp, norm, placement, shares_norm) for each in attention)


def architecture(config: Reading) -> str:
    """The first of the classes that a config names, such as "BertForMaskedLM"; "" for none."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else ""
    return first if isinstance(first, str) else ""


def is_tied(config: Reading, *, default: bool) -> bool:
    """Whether the head with a logit for each token has the table of tokens for its weight."""
    return config.flag("tie_word_embeddings", default=default)


def decoder_head(config: Reading, *, tied: bool, use_bias: bool = False) -> VocabularyTraits:
    """A decoder's head with a logit for each token. tied: where the config does not say."""
    return VocabularyTraits(is_tied(config, default=tied), use_bias)


def decoder_classes(config: Reading) -> ClassifierTraits:
    """A decoder's head for classes: of the last token, or of each."""
    if architecture(config).endswith("ForTokenClassification"):
        return ClassifierTraits("each")
    return ClassifierTraits("last", use_bias=False)
