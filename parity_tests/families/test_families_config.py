"""A config with many wrong values: one error names every one of them, and nothing else."""

import pytest
from click.testing import CliRunner

from helpers.transfer.torch_checkpoints import saved, tensors
from jax_attn.cli import main
from jax_attn.families import FAMILIES, family_of
from jax_attn.families.config import Reading
from jax_attn.transfer import TransferError

PARAMS = {"dim": 64, "n_heads": 4, "n_layers": 2}
YARN = {"type": "yarn", "factor": "4", "beta_fast": -2, "truncate": 1}
# what a config says -> the keys that are wrong
WRONG = {
    "llama": (
        {"hidden_size": "x", "num_attention_heads": 7, "num_key_value_heads": 0}
        | {"rms_norm_eps": -1, "attention_bias": 3, "tie_word_embeddings": "no"}
        | {"max_position_embeddings": 0, "num_hidden_layers": -1, "intermediate_size": 2.5}
        | {"rope_scaling": YARN, "rope_theta": 0},
        "hidden_size num_key_value_heads rms_norm_eps attention_bias tie_word_embeddings "
        "max_position_embeddings num_hidden_layers intermediate_size factor beta_fast truncate "
        "rope_theta",
    ),
    "llama, of values that do not go together": (
        {"hidden_size": 60, "num_attention_heads": 8, "num_key_value_heads": 3, "rope_theta": []},
        "num_attention_heads num_key_value_heads rope_theta",
    ),
    "mistral": ({"sliding_window": "5", "head_dim": 10**400}, "sliding_window head_dim"),
    "qwen3, its window unused": (
        {"layer_types": ["a"], "max_window_layers": -2, "sliding_window": 0, "head_dim": True},
        "layer_types max_window_layers sliding_window head_dim",
    ),
    "qwen2, of too few kinds of layers": (
        {"layer_types": ["full_attention"], "num_hidden_layers": 3, "use_sliding_window": 1},
        "layer_types use_sliding_window",
    ),
    "falcon": (
        {"num_kv_heads": 0, "alibi": 2, "bias": "x", "num_attention_heads": 3, "multi_query": 1}
        | {"num_ln_in_parallel_attn": "y", "parallel_attn": 0},
        "num_kv_heads alibi bias num_attention_heads multi_query num_ln_in_parallel_attn "
        "parallel_attn",
    ),
    "bert": (
        {"position_embedding_type": "relative", "hidden_size": 5, "is_decoder": 3}
        | {"tie_word_embeddings": 4},
        "position_embedding_type num_attention_heads is_decoder tie_word_embeddings",
    ),
    "falcon, of values that do not go together": (
        {"new_decoder_architecture": True, "num_attention_heads": 71, "num_kv_heads": 4},
        "num_kv_heads",
    ),
    "bloom": ({"hidden_size": 0, "n_head": "8", "n_layer": 1.5}, "hidden_size n_head n_layer"),
    "gpt_neox": (
        {"hidden_size": 64, "num_attention_heads": 8, "rotary_pct": 9, "attention_bias": "no"},
        "rotary_pct attention_bias",
    ),
    "gpt_neox, by two names": (
        {"partial_rotary_factor": 0.5, "rotary_pct": "x", "rotary_emb_base": 0},
        "rotary_pct rotary_emb_base",
    ),
    "gpt_neox, half a pair": (
        {"hidden_size": 60, "num_attention_heads": 6, "rotary_pct": 0.3},
        "rotary_pct",
    ),
    "gpt2": (
        {"n_embd": 0, "n_head": 7, "scale_attn_weights": 3, "add_cross_attention": True},
        "n_embd scale_attn_weights add_cross_attention",
    ),
    "gpt2, heads that do not share the width": ({"n_embd": 30, "n_head": 7}, "n_head"),
    "gpt_bigcode": (
        {"multi_query": "yes", "n_head": 7, "add_cross_attention": True},
        "multi_query n_head add_cross_attention",
    ),
    "t5": (
        {"d_model": 0, "num_heads": 7.5, "d_kv": "x", "relative_attention_num_buckets": []}
        | {"relative_attention_max_distance": 0, "num_decoder_layers": "2"}
        | {"scale_decoder_outputs": 0},
        "d_model num_heads d_kv relative_attention_num_buckets relative_attention_max_distance "
        "num_decoder_layers scale_decoder_outputs",
    ),
    "vit": (
        {"hidden_size": 13, "qkv_bias": "x", "intermediate_size": 0},
        "num_attention_heads qkv_bias intermediate_size",
    ),
    "gpt_oss": (
        {"head_dim": 0, "num_key_value_heads": 7, "attention_bias": "x", "sliding_window": None}
        | {"rope_scaling": YARN, "layer_types": ["sliding_attention"], "num_hidden_layers": 2},
        "head_dim num_key_value_heads attention_bias sliding_window layer_types factor beta_fast "
        "truncate",
    ),
    "bert, null": ({"num_attention_heads": None}, "num_attention_heads"),
    "gpt2, null": ({"n_head": None}, "n_head"),
    "gpt_bigcode, null": ({"n_head": None}, "n_head"),
    "bloom, null": ({"n_head": None}, "n_head"),
    "t5, null": ({"num_heads": None}, "num_heads"),
    "vit, null": ({"num_attention_heads": None}, "num_attention_heads"),
    "Meta's": (
        PARAMS | {"n_layers": "2", "n_kv_heads": 3, "use_scaled_rope": 2, "rope_theta": -1},
        "n_layers n_kv_heads use_scaled_rope rope_theta",
    ),
}


def config_of(name):
    said, wrong = WRONG[name]
    kind = {} if name == "Meta's" else {"model_type": name.split(",")[0]}
    return kind | said, {key.replace("_or_", " or ") for key in wrong.split()}


@pytest.mark.parametrize("name", WRONG)
def test_every_wrong_value_is_named_at_once_whatever_is_asked(name):
    config, wrong = config_of(name)
    family = family_of(config)
    prefix = family.places_in(Reading(config))[0].torch.replace("{layer}", "0")
    for ask in (
        lambda: family.traits(config, prefix),
        lambda: family.block(config),
        lambda: family.blocks(config, []),
        lambda: family.model(config, []),
    ):
        with pytest.raises(TransferError) as caught:
            ask()
        assert {p.name.removeprefix("config.json ") for p in caught.value.problems} == wrong


@pytest.mark.parametrize("name", [*(t for f in FAMILIES.values() for t in f.model_types), "Meta's"])
def test_a_config_that_leaves_everything_out_is_right(name):
    config = PARAMS if name == "Meta's" else {"model_type": name}
    assert family_of(config).model(config, []).torch_keys()


@pytest.mark.parametrize("command", [("inspect",), ("port", "--to", "flax")])
def test_the_commands_say_them_all(tmp_path, command):
    config, wrong = config_of("falcon")
    source = saved(tmp_path, tensors({"h.0.self_attention.dense.weight": (7, 3)}), config)
    name, *options = command
    paths = [str(source), *([str(tmp_path / "out")] if name == "port" else [])]
    done = CliRunner().invoke(main, [name, *paths, *options])
    assert done.exit_code == 2
    assert f"{len(wrong)} problems" in done.stderr
    assert all(f"config.json {key}" in done.stderr for key in wrong)
