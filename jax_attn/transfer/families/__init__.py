"""Families of checkpoints: what their attention does, and the tables of their weights."""

from jax_attn.transfer.families.bloom import BLOOM
from jax_attn.transfer.families.family import (
    BiasTraits,
    Config,
    Family,
    NormTraits,
    Place,
    RotaryTraits,
    Traits,
)
from jax_attn.transfer.families.gpt2 import GPT2
from jax_attn.transfer.families.gpt_bigcode import GPT_BIGCODE
from jax_attn.transfer.families.llama import LLAMA
from jax_attn.transfer.families.t5 import T5

FAMILIES = {family.name: family for family in (BLOOM, GPT2, GPT_BIGCODE, LLAMA, T5)}
"""By name."""

__all__ = [
    "FAMILIES",
    "BiasTraits",
    "Config",
    "Family",
    "NormTraits",
    "Place",
    "RotaryTraits",
    "Traits",
    "family_of",
]


def family_of(config: Config) -> Family | None:
    """The family whose model_types a config's is one of."""
    kind = config.get("model_type")
    return next((f for f in FAMILIES.values() if kind in f.model_types), None)
