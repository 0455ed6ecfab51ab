"""Configs with the fields that published checkpoints have are read: none is refused as unknown.

Older versions of transformers, other software and people wrote fields that a config of today's
transformers does not have.
"""

import json
from pathlib import Path

import pytest

from jax_attn.families import family_of, model_problems

PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())
"""Name of a checkpoint -> its config, and the number of its blocks."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read(name):
    config, blocks = PUBLISHED[name]["config"], PUBLISHED[name]["blocks"]
    assert model_problems(config) == []
    family = family_of(config)
    assert family is not None
    assert len(family.model_traits(config).blocks) == blocks


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("Qwen3-30B-A3B, earlier", "use_qk_norm", False),
        ("Llama-2-7b-hf", "partial_rotary_factor", 0.5),
        ("gpt2-medium", "n_special", 3),
        ("roberta-base-squad2", "relative_positions", True),
    ],
)
def test_a_field_that_may_change_the_model_is_refused(name, field, value):
    (problem,) = model_problems(PUBLISHED[name]["config"] | {field: value})
    assert field in problem.name
