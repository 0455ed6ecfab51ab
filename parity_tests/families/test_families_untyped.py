"""Configs without a model_type: the class that they name tells the family and its kind."""

import json
from collections import defaultdict

import numpy as np
import pytest
import torch
import transformers as tf
from click.testing import CliRunner
from flax import nnx
from transformers.models.auto import modeling_auto as auto

from helpers.families.family_models import GROUPED, PLAIN, ROWS
from jax_attn import models
from jax_attn.cli import main
from jax_attn.families import FAMILIES, family_of, known_types
from jax_attn.families.config import Reading
from jax_attn.transfer import TransferError, flatten

KINDS_OF = defaultdict(set)
"""Every class of transformers -> the model_types for which an Auto class makes it."""
for table, mapping in vars(auto).items():
    if table.startswith("MODEL_") and table.endswith("_MAPPING_NAMES"):
        for kind, names in mapping.items():
            for name in [names] if isinstance(names, str) else names:
                KINDS_OF[name].add(kind)


def test_a_class_of_one_kind_tells_it_if_a_family_has_this_kind_and_nothing_otherwise():
    known = {*known_types()}
    wanted = {name: kind for name, (kind, *more) in KINDS_OF.items() if not more}
    assert {*wanted.values()} >= {kind for f in FAMILIES.values() for kind in f.types_of_models}
    families = {name: family_of(untyped(name)) for name in wanted}
    told = {name: family and family.model_type(untyped(name)) for name, family in families.items()}
    assert told == {name: kind if kind in known else None for name, kind in wanted.items()}


OTHERS = {
    "a head that we do not know": ("BertForMyOwnTask", "bert"),
    "another family, of a longer name": ("Phi3ForCausalLM", None),
    "another family, of a name that begins alike": ("GPTNeoXJapaneseForCausalLM", None),
    "a class of one's own": ("MyLlamaForCausalLM", None),
    "an encoder of two": ("T5EncoderModel", "t5"),
    "no class at all": ("Llama", None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_classes_tell_it_only_if_their_stem_is_a_kind(name):
    architecture, kind = OTHERS[name]
    family = family_of(untyped(architecture))
    assert (family and family.model_type(untyped(architecture))) == kind


def untyped(architecture, **values):
    return {"architectures": [architecture], **values}


@pytest.mark.parametrize("name", ROWS)
def test_a_family_reads_the_same_with_and_without_it(name):
    row = ROWS[name]
    config = json.loads(row.config.to_json_string()) | {"architectures": [row.name]}
    without = {key: value for key, value in config.items() if key != "model_type"}
    family = family_of(config)
    assert family_of(without) is family
    prefix = family.places_in(Reading(config))[0].torch.replace("{layer}", "0")
    for ask in (
        lambda said: family.traits(said, prefix),
        lambda said: repr(family.model(said, ())),
        lambda said: family.model_of and family.model_traits(said),
    ):
        assert outcome(ask, without) == outcome(ask, config)


def outcome(ask, config):
    try:
        return ask(config)
    except TransferError as error:  # no whole model: for the same reasons
        return str(error)


KINDS = {
    "biases by kind": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**GROUPED)),
    "positions by kind": lambda: tf.RobertaForMaskedLM(tf.RobertaConfig(**PLAIN)),
    "a head by kind": lambda: tf.GPT2ForTokenClassification(
        tf.GPT2Config(n_embd=24, n_head=6, n_layer=2, vocab_size=41, n_positions=17)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_folder_is_loaded_inspected_and_saved_as_with_it(name, tmp_path):
    torch.manual_seed(0)
    model = KINDS[name]()
    model.save_pretrained(tmp_path / "in")
    want = models.load(tmp_path / "in")
    file = tmp_path / "in" / "config.json"
    config = json.loads(file.read_text())
    kind = config.pop("model_type")
    file.write_text(json.dumps(config))
    got, tokens = models.load(tmp_path / "in"), np.array([[3, 5, 7]])
    assert np.array_equal(got(tokens).hidden, want(tokens).hidden)
    done = CliRunner().invoke(main, ["inspect", str(tmp_path / "in"), "--json"])
    found = json.loads(done.stdout)
    assert (found["model_type"], found["has_model"]) == (kind, True)
    assert any(note.startswith("config.json has no model_type") for note in found["notes"])
    models.save(got, tmp_path / "out")
    assert isinstance(tf.AutoConfig.from_pretrained(tmp_path / "out"), type(model.config))
    made = models.from_config(config, rngs=nnx.Rngs(0))
    assert flatten(made).keys() == flatten(want).keys()


REFUSED = {
    "both missing": ({"hidden_size": 24}, "got none, and no architectures"),
    "a class of one's own": (
        untyped("MyLlamaForCausalLM", hidden_size=24),
        "got none, and architectures ['MyLlamaForCausalLM']",
    ),
    "another family": ({"model_type": "cohere", "architectures": ["LlamaModel"]}, "got 'cohere'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_names_no_family_is_refused_with_what_it_says(name):
    config, said = REFUSED[name]
    with pytest.raises(TransferError) as refusal:
        models.from_config(config, rngs=nnx.Rngs(0))
    assert said in str(refusal.value)
