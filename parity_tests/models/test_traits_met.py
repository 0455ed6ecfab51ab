"""The small models have every value of every trait, and every pair that a family combines."""

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from itertools import combinations
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import transformers as tf

from helpers.families.whole_models import CASES, config_of
from jax_attn.families import model_family, traits
from jax_attn.families.traits import ACTIVATION_NAMES, ModelTraits

KINDS = [
    kind for kind in vars(traits).values() if isinstance(kind, type) and "Traits" in kind.__name__
]

# What only the attention of families without a model has, by trait.
WITHOUT_A_MODEL = {
    "Traits.add_bias_kv = True",
    "Traits.kdim given",
    "Traits.vdim given",
    "RotaryTraits.interleaved = True",
}


def values(kind: type, name: str, hint: Any) -> Iterator[str]:
    """The values that a trait can have, as far as its type tells them apart."""
    options = get_args(hint) if get_origin(hint) in (Literal, UnionType) else (hint,)
    for option in options:
        if option is type(None):
            yield f"{kind.__name__}.{name} = None"
        elif option is bool:
            yield from (f"{kind.__name__}.{name} = {value}" for value in (True, False))
        elif get_origin(hint) is Literal:
            yield f"{kind.__name__}.{name} = {option}"
        elif type(None) in options and option is not str:
            yield f"{kind.__name__}.{name} given"


def met(value: Any, name: str = "") -> Iterator[str]:
    """The traits of a model as words, alike for all numbers."""
    if is_dataclass(value) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        for field in get_type_hints(type(value)):
            yield from met(getattr(value, field), f"{type(value).__name__}.{field}")
    elif isinstance(value, tuple) and value and is_dataclass(value[0]):
        for each in value:
            yield from met(each, name)
    if isinstance(value, str | bool | None):
        yield f"{name} = {value}"
    elif name:
        yield f"{name} given"


def traits_of(config: Mapping[str, Any]) -> ModelTraits:
    return model_family(config).model_traits(config)


MET = {name: frozenset(met(traits_of(config_of(name)))) for name in CASES}
PAIRS = {pair for words in MET.values() for pair in combinations(sorted(words), 2)}


def test_every_value_of_every_trait():
    hinted = {
        value
        for kind in KINDS
        for name, hint in get_type_hints(kind).items()
        for value in values(kind, name, hint)
    }
    assert {"BlockTraits.placement = sandwich", "MLPTraits.is_gated = True"} <= hinted
    hinted |= {f"MLPTraits.activation = {name}" for name in ACTIVATION_NAMES.values()}
    assert hinted - set.union(*map(set, MET.values())) == WITHOUT_A_MODEL


PUBLISHED = {
    **{
        kind: {}
        for kind in (
            *("bert", "roberta", "xlm-roberta", "camembert", "gpt2", "gpt_bigcode", "gpt_neox"),
            *("falcon", "bloom", "opt", "phi", "llama", "mistral", "qwen2", "qwen3", "gemma2"),
            *("gemma3_text", "mixtral", "qwen3_moe", "gpt_oss", "t5", "mt5", "umt5"),
        )
    },
    "falcon, 40B": {
        "new_decoder_architecture": True,
        "num_kv_heads": 8,
        "num_attention_heads": 128,
        "hidden_size": 8192,
    },
    "falcon, RW": {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    "llama, 3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
    "t5, 1.1 and Flan": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "umt5, its encoder": {"architectures": ["UMT5EncoderModel"]},
    "opt, 350M": {"word_embed_proj_dim": 512, "do_layer_norm_before": False},
    "gpt_neox, one after the other": {"use_parallel_residual": False},
    "qwen2, windows": {"use_sliding_window": True, "max_window_layers": 16},
    "gpt_bigcode, all heads": {"multi_query": False},
    "phi, norms of queries and keys": {"qk_layernorm": True},
    "gpt2, scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
}
"""As transformers makes a config of the family, and the forms in which families are published."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_pair_that_a_family_combines(name):
    config = tf.AutoConfig.for_model(name.partition(",")[0], **PUBLISHED[name]).to_dict()
    words = sorted({*met(traits_of(config))})
    assert [pair for pair in combinations(words, 2) if pair not in PAIRS] == []


def test_a_pair_that_no_small_model_has_is_noticed():
    words = sorted({*MET["gemma2"], *MET["bloom"]})
    assert [pair for pair in combinations(words, 2) if pair not in PAIRS]
