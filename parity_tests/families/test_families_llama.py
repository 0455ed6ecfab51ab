"""Llama, Mistral, Qwen2, Qwen3: transformers' own attention, masks and files against ours."""

from functools import cache

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from helpers.dtype_rows import in_dtypes
from helpers.families import family_mistakes as mistakes
from helpers.families.decoder_cases import Turned, drawn, named, turning
from jax_attn.families import family_of
from jax_attn.families.llama import LLAMA
from jax_attn.families.traits import RotaryTraits
from jax_attn.transfer import TransferError

FILES = {
    "Llama": modeling_llama,
    "Mistral": modeling_mistral,
    "Qwen2": modeling_qwen2,
    "Qwen3": modeling_qwen3,
}
SIZES = {
    "vocab_size": 17,
    "hidden_size": 42,  # not N·H = 60
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
LAST = "model.layers.1.self_attn"
BASE = 500.0


def rope(kind, **fields):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": BASE, "factor": 4.0, **fields}}


LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FROM_LAYER_1 = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4}
IN_LAYER_1 = {
    "use_sliding_window": True,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 4,
}
# name -> (the model, what its config says besides)
CASES = {
    "llama": ("Llama", {}),
    "llama, a key for each query": ("Llama", {"num_key_value_heads": None}),
    "llama with biases": ("Llama", {"attention_bias": True}),
    "llama, linear": ("Llama", rope("linear")),
    "llama, dynamic": ("Llama", rope("dynamic")),
    "llama, llama3": ("Llama", rope("llama3", **LLAMA3)),
    "llama, yarn with biases": (
        "Llama",
        {"attention_bias": True, **rope("yarn", original_max_position_embeddings=16)},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral with a window": ("Mistral", {"sliding_window": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen2, a window from layer 1 on": ("Qwen2", FROM_LAYER_1),
    "qwen3": ("Qwen3", {"rms_norm_eps": 1e-4}),
    "qwen3 with biases": ("Qwen3", {"attention_bias": True}),
    "qwen3, a window in layer 1": ("Qwen3", IN_LAYER_1),
}

# Of most of the others the outputs are compared below, beside mistakes.
USUAL = ("llama, yarn with biases", "qwen2, a window from layer 1 on", "qwen3")


def config_of(name):
    model, options = CASES[name]
    return getattr(transformers, f"{model}Config")(**{**SIZES, **options})


def traits_of(config, place=LAST):
    return LLAMA.traits(config.to_dict(), place)


@cache
def block(name, dtype="float32") -> Turned:
    """transformers' last block, ours with its weights, traits and table."""
    model, config = CASES[name][0], config_of(name)
    attention, angles = (
        getattr(FILES[model], f"{model}{part}") for part in ("Attention", "RotaryEmbedding")
    )

    def theirs(module, x, mask, positions):
        return module(x, angles(config)(x, positions), mask)[0]  # see `Turned`

    return Turned.of(drawn(attention(config, layer_idx=1)), config, LAST, theirs, dtype)


@pytest.mark.slow
@in_dtypes(
    "name",
    USUAL,
    low=("llama, yarn with biases",),
    long=[name for name in CASES if name not in USUAL],
)
def test_a_block_agrees_with_transformers(name, dtype):
    block(name, dtype).check().raise_for_status()


# what is wrong -> (the case, how its port is made)
MISTAKES = {
    "key and value swapped": ("llama", mistakes.swapped("k_proj", "v_proj")),
    "half of a head turned": ("llama", turning(dim=4)),
    "another base": ("llama", turning(base=1.01e4)),
    "a scale of its own": ("llama", mistakes.otherwise(scale=(42 / 6) ** -0.5)),
    "scores not sharpened": (
        "llama, yarn with biases",
        turning(scaling=("Yarn", {"factor": 4.0, "original_length": 16, "attention_factor": 1.0})),
    ),
    "a dynamic length 1 off": (
        "llama, dynamic",
        turning(scaling=("DynamicNTK", {"factor": 4.0, "original_length": 63})),
    ),
    "norms swapped": ("qwen3", mistakes.swapped("q_norm", "k_norm")),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake):
    name, mistaken = MISTAKES[mistake]
    mistakes.assert_seen(mistaken, block(name))


# --- whole files ----------------------------------------------------------------------------------


def test_a_key_of_no_row_is_an_error():
    """qk_norm is Qwen3's alone."""
    keys = {"self_attn.q_norm.weight": (10,), "self_attn.q_proj.weight": (60, 42)}
    layer_0 = {f"model.layers.0.{key}": shape for key, shape in keys.items()}
    for kind in ("qwen3", "llama"):
        config = config_of(kind).to_dict()
        layout, sizes = LLAMA.model(config, layer_0), LLAMA.traits(config, LAST).sizes
        if kind == "qwen3":
            assert "layers.0.attention.q_norm.scale" in layout.shapes(layer_0, sizes)
            continue
        with pytest.raises(TransferError, match=r"unexpected: 'model\.layers\.0.*q_norm"):
            layout.shapes(layer_0, sizes)


def test_frequencies_in_old_files_are_passed_over():
    tensors = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}
    layout = LLAMA.model(config_of("llama").to_dict(), tensors)
    assert layout.to_flax(tensors, {}) == {}


# --- configs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", FILES)
def test_what_a_config_does_not_say_is_transformers_default(model):
    """The last layer, where Qwen2 and Qwen3 would have a window."""
    made = getattr(transformers, f"{model}Config")()
    config = {"model_type": made.model_type}
    place = f"layers.{made.num_hidden_layers - 1}.self_attn"
    assert LLAMA.traits(config, place) == traits_of(made, place)
    if model in ("Qwen2", "Qwen3"):
        made.use_sliding_window = config["use_sliding_window"] = True
        old = {**made.to_dict(), "sliding_window": 4096, "layer_types": None}
        assert LLAMA.traits(config, place) == LLAMA.traits(old, place)
        assert LLAMA.traits(config, place).window == 4096
        assert LLAMA.traits(config, "layers.27.self_attn").window is None


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"rope_theta": 5e5}, RotaryTraits(5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ("Linear", {"factor": 2.0})),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": 32},
            ("Yarn", {"factor": 2.0, "original_length": 32}),
        ),
        (
            {
                "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 16},
                "max_position_embeddings": 64,
            },
            ("Yarn", {"factor": 4.0, "original_length": 16}),
        ),
        (
            {
                "rope_parameters": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
                "original_max_position_embeddings": 128,
            },
            (
                "Llama3",
                {
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_length": 128,
                },
            ),
        ),
        # Twice, as after several versions: the same in two spellings.
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
                "rope_theta": 5e5,
            },
            RotaryTraits(5e5, scaling=("Linear", {"factor": 2.0})),
        ),
        (
            {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 1e4}},
            RotaryTraits(1e4),
        ),
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            RotaryTraits(5e5),
        ),
    ],
)
def test_rotary_positions_as_configs_of_all_times_say_them(said, expected):
    made = LLAMA.traits({"model_type": "llama", **said}, LAST).rotary
    assert made == (
        expected if isinstance(expected, RotaryTraits) else made._replace(scaling=expected)
    )


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"hidden_size": 0}, "hidden_size: expected a whole number ≥ 1, got 0"),
        ({"num_attention_heads": "8"}, "num_attention_heads: expected a whole number ≥ 1, got '8'"),
        ({"num_attention_heads": 7}, "num_attention_heads: expected a divisor of hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_"),
        ({"rms_norm_eps": True}, "rms_norm_eps: expected a number above 0, got True"),
        ({"attention_bias": 1}, "attention_bias: expected true or false, got 1"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type: expected one of default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "factor: expected a number above 0, got None"),
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_theta: expected 10000.0, as rope_theta in rope_parameters, got 500000.0",
        ),
        (  # which transformers reads with a base of 10000
            {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 5e5}},
            "rope_parameters: expected the same as rope_scaling",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types: expected a list that reaches layer 1",
        ),
    ],
)
def test_what_a_config_says_wrong_is_named(said, message):
    config = {"model_type": "llama", **said}
    with pytest.raises(TransferError) as caught:
        family_of(config).traits(config, LAST)
    assert f"config.json {message}" in named(caught.value)


def test_a_text_config_inside_another_is_not_recognised():
    assert family_of({"model_type": "llava", "text_config": {"model_type": "llama"}}) is None
