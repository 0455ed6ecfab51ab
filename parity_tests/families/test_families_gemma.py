"""Gemma 2 and 3: what configs say of attention, layer by layer."""

import pytest
import transformers

from jax_attn.families import family_of
from jax_attn.families.traits import NormTraits, RotaryTraits
from jax_attn.transfer.problems import TransferError

LINEAR = RotaryTraits(1e6, scaling=("Linear", {"factor": 8.0}))


def traits(config, layer):
    config = {"num_hidden_layers": 7, **config}
    return family_of(config).traits(config, f"layers.{layer}.self_attn")


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
@pytest.mark.parametrize("layer", [0, 1, 4, 5, 6])
def test_what_a_config_does_not_say_is_transformers_default(kind, layer):
    made = transformers.AutoConfig.for_model(kind, num_hidden_layers=7)
    assert traits({"model_type": kind}, layer) == traits(made.to_dict(), layer)
    assert (traits({"model_type": kind}, layer).window is None) == (
        made.layer_types[layer] == "full_attention"
    )


SAID = {
    # what a config says -> the rotary positions of layers 0, with a window, and 5, without one
    "nothing": ({}, RotaryTraits(1e4), RotaryTraits(1e6)),
    "bases": (
        {"rope_theta": 5e5, "rope_local_base_freq": 5e3},
        RotaryTraits(5e3),
        RotaryTraits(5e5),
    ),
    "a scaling, as first published": (
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6},
        RotaryTraits(1e4),
        LINEAR,
    ),
    "both kinds": (
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 5e3},
            }
        },
        RotaryTraits(5e3),
        LINEAR,
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_rotary_positions_as_configs_of_all_times_say_them(name):
    said, sliding, full = SAID[name]
    config = {"model_type": "gemma3_text", **said}
    assert (traits(config, 0).rotary, traits(config, 5).rotary) == (sliding, full)
    again = transformers.Gemma3TextConfig(num_hidden_layers=7, **said).to_dict()
    assert (traits(again, 0).rotary, traits(again, 5).rotary) == (sliding, full)


def test_norms_of_queries_and_keys_add_one():
    config = {"model_type": "gemma3_text", "rms_norm_eps": 1e-4}
    assert traits(config, 0).qk_norm == NormTraits("rms", 1e-4, adds_one=True)
    assert traits(config | {"model_type": "gemma2"}, 0).qk_norm is None


WRONG = {
    # what a config says -> the names that are refused
    "a cap on scores, which transformers passes over": (
        {"attn_logit_softcapping": 50.0},
        {"attn_logit_softcapping"},
    ),
    "rotary positions for no kind of layer": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters"},
    ),
    "of no kind": ({"rope_parameters": {"full_attention": 3}}, {"full_attention"}),
    "a pattern, both ways": (
        {"sliding_window_pattern": 0, "use_bidirectional_attention": True},
        {"sliding_window_pattern", "use_bidirectional_attention"},
    ),
    "a scaling by its oldest name": (
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
        {"rope_scaling"},
    ),
    "two bases, one wrong": (
        {
            "rope_local_base_freq": 5e3,
            "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}},
        },
        {"rope_local_base_freq"},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_config_says_wrong_is_named(name):
    said, names = WRONG[name]
    with pytest.raises(TransferError) as caught:
        traits({"model_type": "gemma3_text", **said}, 5)
    assert {problem.name.split()[-1] for problem in caught.value.problems} == names
