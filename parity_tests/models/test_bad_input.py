"""What models refuse, each by its name: configs, files, arguments."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers.attention.meshes import assert_near, moved
from helpers.families.whole_models import LAYERS, D
from jax_attn import models
from jax_attn.attention.checks import ArgumentError
from jax_attn.families import model_family
from jax_attn.transfer import TransferError

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4}

# case, what its config says otherwise -> words of the error
CONFIGS = {
    "another family": ("llama", {"model_type": "jamba"}, ("model_type", "mistral", "'jamba'")),
    "a family without a model": ("bert", {"model_type": "electra"}, ("whole models", "electra")),
    "experts": ("llama", {"num_local_experts": 8}, ("num_local_experts", "null", "8")),
    "more experts for a token than there are": (
        "mixtral",
        {"num_experts_per_tok": 6},
        ("num_experts_per_tok", "at most 5"),
    ),
    "two counts of experts": (
        "mixtral",
        {"num_experts": 4},
        ("num_experts", "the same as num_local_experts, which is 5"),
    ),
    "experts beyond number": ("mixtral", {"num_local_experts": 2**40}, ("at most 4096",)),
    "layers without experts": (
        "qwen3_moe",
        {"mlp_only_layers": [0], "decoder_sparse_step": 2},
        ("mlp_only_layers", "decoder_sparse_step"),
    ),
    "another activation, limit and window, and other experts": (
        "gpt_oss",
        {"hidden_act": "gelu", "swiglu_limit": 0, "sliding_window": None, "num_local_experts": 2}
        | {"experts_per_token": 2, "swiglu_beta": 1.0},
        ("hidden_act", "swiglu_limit", "sliding_window", "experts_per_token", "swiglu_beta"),
    ),
    "quantized weights": (
        "gpt2",
        {"quantization_config": {"bits": 4}},
        ("quantization_config", "dequantize them in transformers"),
    ),
    "heads that are null": ("gpt2", {"n_head": None}, ("n_head", "≥ 1", "None")),
    "cross-attention": ("bert", {"add_cross_attention": True}, ("add_cross_attention", "false")),
    "a kind of rope": ("llama", {"rope_parameters": LONGROPE}, ("rope_type", "llama3", "longrope")),
    "a kind of attention": (
        "bert",
        {"position_embedding_type": "relative_key"},
        ("position_embedding_type", "'absolute'"),
    ),
    "attention both ways": (
        "gemma2",
        {"use_bidirectional_attention": True},
        ("use_bidirectional_attention", "false"),
    ),
    "a decoder that sees later tokens": ("llama", {"is_causal": False}, ("is_causal", "true")),
    "likewise by null": ("bert, causal", {"is_causal": None}, ("is_causal", "true", "None")),
    "an activation": ("opt", {"activation_function": "mish"}, ("activation_function", "relu")),
    "an unknown field": ("llama", {"residual_multiplier": 0.5}, ("residual_multiplier", "0.5")),
    "a field of another family": ("opt", {"sliding_window": 5}, ("sliding_window", "5")),
    "two rotary settings": (
        "llama",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ("rope_parameters", "the same as rope_scaling"),
    ),
    "two counts of key heads": (
        "gpt_bigcode",
        {"num_key_value_heads": 2},
        ("num_key_value_heads", "1, by multi_query"),
    ),
    "two activations": ("gemma2", {"hidden_act": "relu"}, ("hidden_act", "hidden_activation")),
    "two widths": ("gpt2", {"hidden_size": 64}, ("hidden_size", "the same as n_embd, which is 32")),
    "two widths of Falcon": (
        "falcon, one key head",
        {"n_embed": 64},
        ("hidden_size", "the same as n_embed, which is 64"),
    ),
    "two numbers of layers": (
        "llama",
        {"n_layer": 3},
        ("n_layer", "the same as num_hidden_layers, which is 2"),
    ),
    "kinds of too few layers": (
        "gemma2",
        {"layer_types": ["full_attention"]},
        ("layer_types", "2 words"),
    ),
    "an epsilon that is a word": ("gpt2", {"layer_norm_epsilon": "x"}, ("layer_norm_epsilon",)),
    "an epsilon that is no number": ("bert", {"layer_norm_eps": float("nan")}, ("eps", "nan")),
    "several at once": (
        "llama",
        {"num_local_experts": 8, "hidden_act": 3, "rms_norm_eps": -1, "unheard_of": True},
        ("num_local_experts", "hidden_act", "rms_norm_eps", "unheard_of"),
    ),
}

# case, what its config says otherwise -> words of the error
SIZES = {
    "more layers": (
        "llama",
        {"num_hidden_layers": 2**40},
        (f"expected attention in {2**40} layers", "but none in [2, 3"),
    ),
    "fewer layers": ("gpt2", {"n_layer": 1}, ("expected attention in 1 layers", "got it in [1]")),
    "a larger vocabulary": ("llama", {"vocab_size": 43}, ("token_embedding", "43")),
    "wider": ("bert", {"hidden_size": 36}, ("head_dim = 9",)),
    "a wider MLP": ("opt", {"ffn_dim": 31}, ("mlp.up", "31")),
    "more experts": ("mixtral", {"num_local_experts": 6}, ("experts.5.w1.weight",)),
    "fewer experts": ("mixtral", {"num_local_experts": 4}, ("experts.4.w1.weight",)),
    "wider experts": ("qwen3_moe", {"moe_intermediate_size": 17}, ("mlp.experts.up", "17")),
    "fewer positions": ("gpt2", {"n_positions": 19}, ("position_embedding", "19")),
}


@pytest.mark.parametrize("name", ["several at once", *SIZES])
def test_a_file_is_refused_by_the_fields_of_its_config(name, small, tmp_path):
    case, change, words = (CONFIGS | SIZES)[name]
    folder = tmp_path / "model"
    shutil.copytree(small(case).folder, folder)
    (folder / "config.json").write_text(json.dumps(small(case).config | change))
    with pytest.raises(TransferError) as refused:
        models.load(folder)
    assert [word for word in words if word not in str(refused.value)] == []


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_refused_by_its_field(name, small):
    case, change, words = CONFIGS[name]
    with pytest.raises(TransferError) as refused:
        models.from_config(small(case).config | change, rngs=nnx.Rngs(0))
    assert [word for word in words if word not in str(refused.value)] == []


def test_fields_that_change_nothing_are_accepted(small):
    """Those of other software, and features that are off."""
    others = {"auto_map": {"AutoModel": "x.Y"}, "unheard_of": None, "router": 0, "n_ctx": 23}
    others |= {"is_causal": True}
    models.from_config(small("gpt2").config | others, rngs=nnx.Rngs(0))


def test_a_value_that_json_cannot_hold_is_refused_by_its_field(small):
    config = small("gpt2").config | {"n_inner": object(), "n_positions": {23}}
    with pytest.raises(TransferError) as refused:
        models.from_config(config, rngs=nnx.Rngs(0))
    assert all(f"config.json {name}" in str(refused.value) for name in ("n_inner", "n_positions"))


def test_no_class_of_two_heads_is_made(small):
    config = small("gpt2").config | {"architectures": ["GPT2DoubleHeadsModel"]}
    with pytest.raises(TransferError, match="got GPT2DoubleHeadsModel"):
        models.from_config(config, rngs=nnx.Rngs(0))


def test_a_head_that_reads_a_pooler_needs_one(small):
    for name, head in (("bert, classes", "classifier"), ("bert", "seq_relationship")):
        traits = model_family(small(name).config).model_traits(small(name).config)
        with pytest.raises(ArgumentError, match=f"heads: expected a pooler.*got {head}"):
            models.Model(traits, {head: 2}, rngs=nnx.Rngs(0))


HALVES = {
    "config.json": r"expected a config\.json",
    "model.safetensors": r"expected \*\.safetensors",
}


@pytest.mark.parametrize("missing", HALVES)
def test_half_a_checkpoint_is_refused(missing, small, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(small("gpt2").folder, folder)
    (folder / missing).unlink()
    with pytest.raises(TransferError, match=HALVES[missing]):
        models.load(folder)


def test_the_name_of_a_hub_is_no_folder():
    with pytest.raises(TransferError, match=r"(?s)nothing is downloaded.*hf download org/name "):
        models.load("org/name")


@pytest.mark.parametrize("field", [{"id2label": 3}, {"id2label": None, "num_labels": "x"}])
def test_labels_that_are_none_are_refused(field, small):
    config = small("gpt2").config | {"architectures": ["GPT2ForSequenceClassification"]} | field
    with pytest.raises(TransferError, match=r"id2label|num_labels"):
        models.from_config(config, rngs=nnx.Rngs(0))


TOKENS = np.array([[5, 7, 11], [13, 17, 19]])

# what a model of 41 tokens and 23 positions is called with -> words of the error
ARGUMENTS = {
    "a token too large": ({"tokens": TOKENS + 30}, "tokens: expected 0 to 40, got 35 to 49"),
    "a token below 0": ({"tokens": TOKENS - 6}, "tokens: expected 0 to 40, got -1 to 13"),
    "tokens that are no integers": ({"tokens": TOKENS * 1.0}, "tokens: expected an array of int"),
    "one row": ({"tokens": TOKENS[0]}, "tokens: expected (B, T) integers"),
    "no tokens": ({"tokens": TOKENS[:, :0]}, "tokens: expected (B, T) integers"),
    "too many": ({"tokens": np.ones((1, 24), int)}, "tokens: expected at most 23 in a row, got 24"),
    "a length of 0": ({"lengths": np.array([3, 0])}, "lengths: expected 1 to 3, got 0 to 3"),
    "a length too large": ({"lengths": np.array([4, 1])}, "lengths: expected 1 to 3, got 1 to 4"),
    "lengths of other rows": ({"lengths": np.array([3])}, "lengths: expected (2,)"),
    "lengths and a mask": (
        {"lengths": np.array([3, 3]), "attention_mask": np.ones((2, 3), int)},
        "lengths: expected one of lengths and attention_mask, got both",
    ),
    "a mask of others": (
        {"attention_mask": np.full((2, 3), 2)},
        "attention_mask: expected only 0 and 1, got values from 2 to 2",
    ),
    "a row without a token": (
        {"attention_mask": np.array([[1, 1, 1], [0, 0, 0]])},
        "attention_mask: expected a 1 in every row, got none in rows [1]",
    ),
    "types without a table": ({"types": TOKENS}, "types: expected None"),
    "a position too large": ({"positions": np.arange(21, 24)}, "positions: expected 0 to 22"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_refused_by_name(name, small):
    change, words = ARGUMENTS[name]
    model = models.load(small("gpt2").folder)
    with pytest.raises(ArgumentError) as refused:
        model(**({"tokens": TOKENS} | change))
    assert words in str(refused.value)


TWO_CACHES = "cache: expected a tuple of 2 KVCaches of batch 2, one for each layer, got"

# what is put in the place of a cache of 2 layers and 2 rows -> words of the error
CACHES = {
    "no cache at all": (lambda model: (), f"{TWO_CACHES} an empty tuple"),
    "that of one layer": (lambda model: model.empty_cache(2, 5)[0], f"{TWO_CACHES} KVCache"),
    "too few layers": (lambda model: model.empty_cache(2, 5)[:1], f"{TWO_CACHES} one of batch 2"),
    "other rows": (
        lambda model: model.empty_cache(3, 5),
        f"{TWO_CACHES} one of batch 3, one of batch 3",
    ),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_of_another_model_is_refused(name, small):
    make, words = CACHES[name]
    model = models.load(small("gpt2").folder)
    with pytest.raises(ArgumentError) as refused:
        model(TOKENS, cache=make(model))
    assert words in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "opt", "mistral"])
def test_a_row_that_ended_leaves_the_others_as_they_are(name, small):
    """In chunks beside a cache, where it has a length of 0."""
    folder = small(name).folder

    def runs(model):
        cache = model.empty_cache(2, 9)
        first = model(TOKENS, np.array([3, 2]), cache=cache).cache
        second = model(TOKENS + 1, np.array([3, 0]), cache=first)
        alone = model(TOKENS[:1], cache=model.empty_cache(1, 9)).cache
        alone = model(TOKENS[:1] + 1, cache=alone)
        assert [c.filled.tolist() for c in second.cache] == [[6, 2]] * 2
        assert np.isfinite(second.logits).all()
        # Rows that never began are as harmless.
        never = model(TOKENS, np.array([3, 0]), cache=cache)
        found = second.logits[0], never.logits[0]
        return found, (alone.logits[0], model(TOKENS[:1]).logits[0])

    with jax.enable_x64(True):
        found, wanted = runs(models.load(folder, dtype=np.float64))
        _, near = runs(moved(models.load(folder, dtype=np.float64)))
        # In a layer over the features of four products, six keys, and the MLP's, at most 4 * D.
        assert_near(found, wanted, near, additions=LAYERS * (4 * D + 6 + 4 * D) + D)


def test_under_jit_an_unknown_token_makes_its_row_nan(small):
    """Values are not known there: the row shows it, and the other does not."""
    model = models.load(small("gpt2").folder)
    logits = nnx.jit(lambda m, x: m(x).logits)(model, jnp.asarray(TOKENS).at[0, 1].set(99))
    assert np.isnan(logits[0, 1:]).all()
    assert np.isfinite(logits[1]).all()


def test_a_target_that_exists_is_left_alone(small, tmp_path):
    (tmp_path / "kept").mkdir()
    model = models.load(small("gpt2").folder)
    with pytest.raises(TransferError, match="does not exist yet"):
        models.save(model, tmp_path / "kept")
    assert list((tmp_path / "kept").iterdir()) == []
