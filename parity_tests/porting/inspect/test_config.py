"""What a config says of attention: heads that must agree, and what a rebuild lacks."""

import json

import numpy as np
import pytest

from jax_attn.porting.inspect.config import (
    UnknownHeadsError,
    head_counts,
    lacking,
    seen_from,
    typed,
)
from jax_attn.porting.inspect.contents import inspect
from jax_attn.porting.inspect.discover import discover
from jax_attn.porting.inspect.starting_table import starting_table
from jax_attn.porting.verify.survey import survey
from jax_attn.transfer import TransferError, load_checkpoint, save_checkpoint
from jax_attn.transfer.arrays import Spec
from jax_attn.transfer.files.port_folder import read_config

D, N, K, H = 30, 6, 3, 5
ATTENTION = "layers.0.self_attn"


def block(query=D, shared=K * H):
    shapes = {"q_proj": (query, D), "k_proj": (shared, D), "v_proj": (shared, D)}
    shapes["o_proj"] = (D, query)
    specs = {f"{ATTENTION}.{n}.weight": Spec(s, "float32") for n, s in shapes.items()}
    return discover(specs)[0]


# --- heads --------------------------------------------------------------------------------------

HEADS = {
    "BERT": ({"num_attention_heads": N}, None, None),
    "GPT-2": ({"n_head": N}, None, None),
    "T5": ({"num_heads": N, "d_kv": H}, None, None),
    "DistilBERT": ({"n_heads": N, "n_kv_heads": K}, None, None),
    "Llama": ({"num_attention_heads": N, "num_key_value_heads": K, "head_dim": H}, None, None),
    "options alone": ({}, N, K),
    "an option that agrees": ({"num_attention_heads": N}, N, None),
    "null is not said": ({"num_attention_heads": N, "head_dim": None}, None, None),
}


@pytest.mark.parametrize(("config", "heads", "kv_heads"), HEADS.values(), ids=HEADS)
def test_heads_and_what_follows_from_them(config, heads, kv_heads):
    assert head_counts(block(), config, heads, kv_heads) == ((N, K, H), None)


def test_a_softcap_is_taken_over():
    config = {"num_attention_heads": N, "attn_logit_softcapping": 50}
    _, softcap = head_counts(block(), config, None, None)
    assert softcap == 50.0


def test_unknown_heads_name_the_option_and_the_key():
    with pytest.raises(UnknownHeadsError, match=rf"{ATTENTION}.q_proj.weight.*--num-heads"):
        head_counts(block(), {"hidden_size": D}, None, None)


DISAGREE = {
    "option and config": (
        {"num_attention_heads": N},
        {"num_heads": 5},
        ["--num-heads = 5", "config.json num_attention_heads = 6"],
    ),
    "config and config": (
        {"num_attention_heads": N, "n_head": 3},
        {},
        ["num_attention_heads = 6", "n_head = 3"],
    ),
    "kv option and config": (
        {"num_attention_heads": N, "num_key_value_heads": K},
        {"num_kv_heads": 2},
        ["--num-kv-heads = 2", "num_key_value_heads = 3"],
    ),
    "kv heads and rows": (
        {"num_attention_heads": N, "num_key_value_heads": 2},
        {},
        ["k_proj.weight", "10 key rows", "num_key_value_heads = 2", "got 15 rows"],
    ),
    "heads that do not divide": (
        {},
        {"num_heads": 7},
        ["q_proj.weight", "a multiple of --num-heads = 7", "got 30 rows"],
    ),
    "head_dim that does not divide key rows": (
        {},
        {"num_heads": 3},
        ["k_proj.weight", "a multiple of head_dim = 10", "got 15 rows"],
    ),
    "head_dim said otherwise": (
        {"num_attention_heads": N, "head_dim": 4},
        {},
        ["q_proj.weight", "24 query rows", "head_dim = 4", "got 30 rows"],
    ),
    "a head count that is no count": ({"num_attention_heads": True}, {}, ["got True"]),
    "zero heads": ({"n_head": 0}, {}, ["n_head", "got 0"]),
    "half a head": ({"n_head": 6.0}, {}, ["n_head", "got 6.0"]),
    "a word": ({"num_key_value_heads": "3"}, {"num_heads": N}, ["got '3'"]),
    "a softcap below 0": ({"n_head": N, "attn_logit_softcapping": -1}, {}, ["got -1"]),
    "a softcap beyond float": (
        {"n_head": N, "attn_logit_softcapping": 10**400},
        {},
        ["expected a number above 0, got 1000"],
    ),
    "everything at once": (
        {"n_head": 0, "num_key_value_heads": -1, "head_dim": "x"},
        {},
        ["n_head", "num_key_value_heads", "head_dim"],
    ),
}


@pytest.mark.parametrize(("config", "options", "named"), DISAGREE.values(), ids=DISAGREE)
def test_what_disagrees_is_an_error_that_names_all_of_it(config, options, named):
    given = {"num_heads": None, "num_kv_heads": None} | options
    with pytest.raises(TransferError) as error:
        head_counts(block(), config, **given)
    for word in named:
        assert word in str(error.value)


def test_kv_heads_must_divide_heads():
    with pytest.raises(TransferError, match=r"k_proj.weight.*key/value heads that divide"):
        head_counts(block(shared=4 * H), {"n_head": N}, None, None)


# --- the part of a config that concerns a block -------------------------------------------------

TOWERS = {
    "text_config": {"num_attention_heads": 8, "rope_theta": 1e4},
    "vision_config": {"num_heads": 16},
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("config", "prefix", "name", "value"),
    [
        (TOWERS, "text_model.encoder.layers.0.self_attn", "num_attention_heads", 8),
        (TOWERS, "language_model.layers.0.self_attn", "num_attention_heads", 8),
        (TOWERS, "visual.blocks.0.attn", "num_heads", 16),
        (TOWERS, "visual.blocks.0.attn", "num_attention_heads", None),
        (TOWERS, "layers.0.attn", "num_attention_heads", 4),
        ({"n_heads": 4, "attn_config": {"alibi": True}}, "blocks.0.attn", "alibi", True),
        ({"n_heads": 4, "attn_config": {"alibi": True}}, "blocks.0.attn", "n_heads", 4),
        ({"decoder_attention_heads": 2}, "decoder.layers.0.self_attn", "num_attention_heads", 2),
        ({"decoder_attention_heads": 2}, "encoder.layers.0.self_attn", "num_attention_heads", None),
    ],
)
def test_a_part_of_the_config_counts_where_its_module_is(config, prefix, name, value):
    assert seen_from(config, prefix).get(name) == value


# --- what a rebuild lacks -----------------------------------------------------------------------

LACKS = {
    "rotary": ({"rope_theta": 10000.0}, "rotary positions: rope_theta"),
    "rotary scaling": ({"rope_scaling": {"type": "linear"}}, "rotary"),
    "rotary, new words": ({"rope_parameters": {"rope_theta": 1e4}}, "rotary"),
    "partial rotary": ({"rotary_dim": 64}, "rotary"),
    "rotary by position type": ({"position_embedding_type": "rotary"}, "rotary"),
    "rotary by family": ({"model_type": "mistral"}, "rotary positions: model_type = 'mistral'"),
    "relative": ({"position_embedding_type": "relative_key_query"}, "a relative position bias"),
    "relative by family": ({"model_type": "t5"}, "a relative position bias"),
    "ALiBi": ({"alibi": True}, "ALiBi: alibi = True"),
    "ALiBi by family": ({"model_type": "bloom"}, "ALiBi"),
    "window": ({"sliding_window": 4096}, "a window: sliding_window = 4096"),
    "window on": ({"sliding_window": 4096, "use_sliding_window": True}, "a window"),
    "window somewhere": (
        {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
        "a window",
    ),
    "QK-norm": ({"use_qk_norm": True}, "a norm of queries and keys"),
    "scale": ({"query_pre_attn_scalar": 256}, "a scale of its own: query_pre_attn_scalar"),
    "a scale beyond float": ({"query_pre_attn_scalar": 10**400}, "a scale of its own"),
    "multiplier": ({"attention_multiplier": 0.5}, "a scale of its own"),
    "no scale": ({"scale_attn_weights": False}, "a scale of its own"),
    "no scale by family": ({"model_type": "t5"}, "a scale of its own"),
    "landmarks": ({"model_type": "nystromformer"}, "an approximation of the softmax"),
    "clipping": ({"clip_qkv": 8.0}, "clipped projections"),
}


@pytest.mark.parametrize(("config", "text"), LACKS.values(), ids=LACKS)
def test_what_the_config_names_and_the_rebuild_lacks(config, text):
    assert any(f"the rebuild lacks {text}" in doubt for doubt in _lacking(config))


def _lacking(config, beside=()):
    return lacking(config, beside, head_dim=H)


HARMLESS = {
    "nothing": {},
    "BERT": {"model_type": "bert", "position_embedding_type": "absolute", "rope_scaling": None},
    "no ALiBi": {"alibi": False, "position_embedding_type": "alibi_not"},
    "window off": {"sliding_window": 4096, "use_sliding_window": False},
    "no window": {"sliding_window": None},
    "a convolution elsewhere": {"model_type": "mobilevit", "conv_kernel_size": 3},
    "window in no layer": {"sliding_window": 4096, "layer_types": ["full_attention"] * 2},
    "the scale that it is": {"query_pre_attn_scalar": H, "attention_multiplier": H**-0.5},
    "softcap, which the rebuild has": {"attn_logit_softcapping": 50.0},
    "not what it seems": {"layer_types": [["sliding"]], "model_type": {"a": 1}},
}


@pytest.mark.parametrize("config", HARMLESS.values(), ids=HARMLESS)
def test_what_the_rebuild_does_not_lack(config):
    assert _lacking(config) == ()


BESIDE = {
    "q_norm.weight": "a norm of queries and keys",
    "self.k_layernorm.bias": "a norm of queries and keys",
    "norm_q.weight": "a norm of queries and keys",
    "ln_k.weight": "a norm of queries and keys",
    "rotary_emb.inv_freq": "rotary positions",
    "relative_attention_bias.weight": "a relative position bias",
    "self.distance_embedding.weight": "a relative position bias",
    "sinks": "attention sinks",
    "self.logit_scale": "a scale of its own",
    "bias_k": "a learned key and value",
    "q_bias": "a bias of its own name",
    "q_proj.lora_A.weight": "low-rank adapters",
}


@pytest.mark.parametrize(("key", "what"), BESIDE.items(), ids=BESIDE)
def test_what_lies_beside_and_the_rebuild_lacks(key, what):
    assert _lacking({}, (key,)) == (f"the rebuild lacks {what}: {key} next to it",)


@pytest.mark.parametrize(
    "key", ["output.LayerNorm.weight", "layer_norm.bias", "masked_bias", "bias", "attn_norm.weight"]
)
def test_what_lies_beside_and_does_no_harm(key):
    assert _lacking({}, (key,)) == ()


# --- the file -----------------------------------------------------------------------------------


def test_the_config_of_a_file_lies_beside_it_and_of_a_folder_in_it(tmp_path):
    assert read_config(tmp_path) is None
    assert read_config(tmp_path / "model.safetensors") is None
    (tmp_path / "config.json").write_text(json.dumps({"n_head": 3}))
    assert read_config(tmp_path) == {"n_head": 3}
    assert read_config(tmp_path / "model.safetensors") == {"n_head": 3}


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "null", '{"a": \x00}', "\udcff"])
def test_a_config_that_is_none_is_an_error_that_names_it(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(TransferError, match=r"config.json': expected "):
        read_config(tmp_path)


# --- a class instead of a model_type ------------------------------------------------------------

CLASSES = {
    "WhisperForConditionalGeneration": "whisper",
    "CodeGenForCausalLM": "codegen",
    "SwinBackbone": "swin",
    "ReformerModelWithLMHead": "reformer",
    "Wav2Vec2ConformerForCTC": "wav2vec2-conformer",
    "MyOwnModel": None,
}
LINEARS = ("q_proj", "k_proj", "v_proj", "out_proj")
KEYS = [f"{ATTENTION}.{x}.{kind}" for x in LINEARS for kind in ("weight", "bias")]
KEYS.remove(f"{ATTENTION}.k_proj.bias")
WHISPER = {key: np.zeros((D,) * (1 + key.endswith("weight")), np.float32) for key in KEYS}
CODEGEN = {"h.0.attn.qkv_proj.weight": np.zeros((3 * D, D), np.float32)}
CODEGEN |= {"h.0.attn.out_proj.weight": np.zeros((D, D), np.float32)}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_tells_the_type_of_a_config_without_it(name):
    assert typed({"architectures": [name]}).get("model_type") == CLASSES[name]
    assert typed({"architectures": [name], "model_type": "mine"})["model_type"] == "mine"


@pytest.mark.parametrize(
    ("kind", "arrays"), {"whisper": WHISPER, "codegen": CODEGEN}.items(), ids=["whisper", "codegen"]
)
def test_a_checkpoint_is_read_the_same_with_a_class_as_with_its_type(kind, arrays, tmp_path):
    save_checkpoint(tmp_path / "m.safetensors", arrays)
    (name,) = (name for name, told in CLASSES.items() if told == kind)

    def found(**says):
        config = {"num_attention_heads": N, "n_layer": 1, **says}
        with load_checkpoint(tmp_path / "m.safetensors") as checkpoint:
            specs = {key: checkpoint.describe(key) for key in checkpoint}
            layers = [(layer.doubts, layer.notes) for layer in survey(checkpoint, config)]
        table = starting_table(specs, config, {}, "m")
        return layers, inspect(specs, config, {}).attention, table

    of_class, of_type, of_none = found(architectures=[name]), found(model_type=kind), found()
    assert of_class == of_type
    assert of_class != of_none
