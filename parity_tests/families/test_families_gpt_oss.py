"""gpt-oss: transformers' own attention against ours, and what configs say of it."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

from helpers.dtype_rows import in_dtypes
from helpers.families import family_mistakes as mistakes
from helpers.families.decoder_cases import Turned, drawn, turning
from jax_attn.families import family_of, model_problems
from jax_attn.families.traits import ModelTraits, RotaryTraits, SwigluTraits
from jax_attn.porting.port.plan import plan_port
from jax_attn.porting.port.table import by_family
from jax_attn.porting.verify import rebuild
from jax_attn.porting.verify.family_spellings import state
from jax_attn.transfer import Layout, TransferError, ignored

SIZES = {
    "vocab_size": 17,
    "hidden_size": 31,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_local_experts": 5,
    "sliding_window": 3,
    "attn_implementation": "eager",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN |= {"rope_theta": 150.0, "beta_fast": 3.0, "beta_slow": 0.3}
# name -> layer, what the config says besides
CASES = {
    "a window": (0, {}),
    "no window, biases or truncation": (1, {"attention_bias": False}),
    "truncated frequencies": (1, {"rope_parameters": YARN | {"truncate": True}}),
    "frequencies that are not truncated": (1, {"rope_parameters": YARN | {"truncate": False}}),
}
# Of the first the outputs are compared below, beside mistakes.
USUAL = ("frequencies that are not truncated",)


@cache
def block(name, dtype="float32") -> Turned:
    layer, says = CASES[name]
    config = transformers.GptOssConfig(**{**SIZES, **says})
    place = f"model.layers.{layer}.self_attn"

    def theirs(module, x, mask, positions):
        turned = GptOssRotaryEmbedding(config)(x, positions)  # see `Turned`
        return module(x, turned, mask)[0]

    return Turned.of(drawn(GptOssAttention(config, layer)), config, place, theirs, dtype)


@pytest.mark.slow
@in_dtypes("name", USUAL, long=[name for name in CASES if name not in USUAL])
def test_a_block_agrees_with_transformers(name, dtype):
    block(name, dtype).check().raise_for_status()


def without_sinks(block):
    """The mistake of a module that has none, whose table passes those of the file over."""
    kept = (g for g in block.layout.groups if g.alternatives[0][0].keys != ("sinks",))
    layout = Layout(*kept, *block.layout.passed_over, ignored("sinks", "a mistake"))
    return mistakes.loaded(block, traits=replace(block.traits, sinks=False), layout=layout)


MISTAKES = {
    "no sinks": without_sinks,
    "key and value swapped": mistakes.swapped("k_proj", "v_proj"),
    "no window": mistakes.otherwise(window=None),
    "pairs side by side": turning(interleaved=True),
    "another base": turning(base=10000.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_fails(mistake):
    mistakes.assert_seen(MISTAKES[mistake], block("a window"))


@pytest.mark.slow
@pytest.mark.parametrize("says", [True, False])
def test_frequencies_of_the_other_truncation_fail(says):
    name = "truncated frequencies" if says else "frequencies that are not truncated"
    kind, fields = block(name).traits.rotary.scaling
    assert fields["truncate"] is says
    mistaken = turning(scaling=(kind, {**fields, "truncate": not says}))
    mistakes.assert_seen(mistaken, block(name))


def test_the_reference_design_has_the_file_s_sinks():
    """Without the tables: as `verify --attention` reads a block."""
    pair = block("a window")
    module = rebuild.torch_module(pair.traits)
    tensors = {key: p.detach().numpy() for key, p in pair.reference.named_parameters()}
    held = state("gpt_oss", pair.traits, tensors)
    module.load_state_dict({key: torch.from_numpy(array) for key, array in held.items()})
    assert torch.equal(module.sinks, pair.reference.sinks)


def test_a_port_needs_the_sinks_of_every_layer():
    config = transformers.GptOssConfig(**SIZES)
    tensors, said = transformers.GptOssForCausalLM(config).state_dict(), config.to_dict()
    table = by_family(family_of(said), said, tensors)
    assert plan_port(tensors, table, "flax").problems == []
    left = {key: tensor for key, tensor in tensors.items() if not key.endswith("sinks")}
    problems = plan_port(left, by_family(family_of(said), said, left), "flax").problems
    assert {(problem.kind, problem.name) for problem in problems} == {
        ("missing", f"layers.{layer}.attention.sinks") for layer in range(2)
    }


def traits(config, layer):
    return family_of(config).traits(config, f"model.layers.{layer}.self_attn")


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_what_a_config_does_not_say_is_transformers_default(layer):
    made = transformers.GptOssConfig(num_hidden_layers=3).to_dict()
    config = {"model_type": "gpt_oss", "num_hidden_layers": 3}
    assert traits(config, layer) == traits(made, layer)
    assert (traits(config, layer).window is None) == (layer == 1)
    assert whole(config) == whole(made)


def whole(config) -> ModelTraits:
    return family_of(config).model_traits(config, (0,))


PUBLISHED = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
"""The config of gpt-oss-20b, as it was published."""


def test_the_published_config_is_read():
    assert model_problems(PUBLISHED) == []
    block, *_ = whole(PUBLISHED).blocks
    fields = {"factor": 32.0, "original_length": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
    scaling = ("Yarn", fields | {"truncate": False})
    assert block.attention.rotary == RotaryTraits(150000.0, scaling=scaling)
    assert (block.attention.window, block.attention.sinks) == (128, True)
    assert (block.mlp.experts.number, block.mlp.experts.chosen) == (32, 4)
    assert block.mlp.swiglu == SwigluTraits(1.702, 7.0)


def test_every_unsupported_field_is_named_at_once():
    wrong = {"hidden_act": "gelu", "swiglu_alpha": 0, "experts_per_token": 2, "swiglu_beta": 1.0}
    with pytest.raises(TransferError) as caught:
        whole(PUBLISHED | wrong)
    assert {problem.name.split()[-1] for problem in caught.value.problems} == wrong.keys()


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({}, "Yarn"),
        ({"rope_scaling": None, "rope_parameters": None}, "Yarn"),
        ({"rope_scaling": {}}, "Yarn"),
        ({"rope_parameters": {}}, None),
        ({"rope_parameters": {"rope_theta": 150000}}, None),
    ],
)
def test_without_rotary_fields_there_is_yarn_as_in_transformers(said, kind):
    plain = {name: x for name, x in PUBLISHED.items() if name != "rope_scaling"}
    scaling = whole(plain | said).blocks[0].attention.rotary.scaling
    assert (scaling and scaling[0]) == kind
