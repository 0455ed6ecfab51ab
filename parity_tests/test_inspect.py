"""`jax-attn inspect` on every family, as transformers writes it: family, heads, packing, ties."""

import json

import pytest
import torch
import transformers as tf
from click.testing import CliRunner
from family_models import GROUPED, ROWS, N
from torch_checkpoints import bert, llama, saved, tensors

from jax_attn.cli import main
from jax_attn.transfer import save_checkpoint


def inspected(path) -> dict:
    done = CliRunner().invoke(main, ["inspect", str(path), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ROWS)
def test_names_family_heads_and_packing(tmp_path, name):
    row = ROWS[name]
    torch.manual_seed(0)
    row.model(row.config).to(torch.bfloat16).save_pretrained(tmp_path)
    found = inspected(tmp_path)
    assert (found["family"], found["layers"]) == (row.family, row.layers)
    assert found["dtypes"].keys() == {"bfloat16"}
    assert found["bytes"] == found["dtypes"]["bfloat16"]["bytes"]
    assert set(row.tied) <= found["tied"].keys()
    assert found["attention"]
    for attention in found["attention"]:
        heads = attention["num_heads"], attention["num_kv_heads"], attention["head_dim"]
        assert (attention["design"], heads) == (row.design, (N, row.K, row.H))
        assert attention["packed"] == row.packed
        assert row.does.items() <= attention["does"].items()


def test_the_tree_says_what_the_document_does(tmp_path):
    tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)).save_pretrained(tmp_path)
    text = CliRunner().invoke(main, ["inspect", str(tmp_path)]).stdout
    for said in (
        "llama (llama), 2 layers",
        "model.layers.0.self_attn … model.layers.1.self_attn, 2 alike",
        "GQA: N = 6, K = 3, H = 10, D = 24",
        "split projections",
        "scale 1/√10",
        "float32",
    ):
        assert said in text


LIES = {
    "other heads": ({"num_attention_heads": 3}, "expected 3 heads of head_dim = 10, got 6"),
    "another width": ({"head_dim": 13}, "a multiple of head_dim = 13"),
    "other key/value heads": ({"num_key_value_heads": 6}, "expected 6 heads"),
    "more layers": ({"num_hidden_layers": 3}, "expected attention in 3 layers"),
    "fewer layers": ({"num_hidden_layers": 1}, "expected attention in 1 layers"),
    "another model's width": ({"hidden_size": 60}, "expected 60 features"),
    "biases": ({"attention_bias": True}, "q_proj.bias"),
    "no number": ({"num_attention_heads": "six"}, "got 'six'"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_config_that_contradicts_the_file_is_an_error(tmp_path, name):
    change, said = LIES[name]
    tf.LlamaModel(tf.LlamaConfig(**GROUPED)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    done = CliRunner().invoke(main, ["inspect", str(tmp_path), "--json"])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert done.stdout == ""


def test_layers_are_counted_on_either_side_of_an_encoder_decoder(tmp_path):
    row = ROWS["t5"]
    held = row.model(row.config).state_dict()
    kept = {key: t for key, t in held.items() if not key.startswith("encoder.block.1.")}
    saved(tmp_path, kept, row.config.to_dict())
    done = CliRunner().invoke(main, ["inspect", str(tmp_path)])
    assert done.exit_code == 2
    assert "'encoder.block.1': expected attention in 2 layers" in " ".join(done.stderr.split())


def test_an_unknown_family_is_found_by_its_spelling_and_said_so(tmp_path):
    saved(tmp_path, tensors(llama()), {"model_type": "of mine", "num_attention_heads": N})
    found = inspected(tmp_path)
    assert found["family"] is None
    assert found["notes"] == ["model_type 'of mine': the family is not known"]
    (attention,) = found["attention"]
    assert (attention["design"], attention["num_kv_heads"], attention["head_dim"]) == ("GQA", 3, 5)


UNSAID = {
    "as many key rows": (bert(), "MHA", "30 query rows"),
    "fewer": (llama(), "MQA or GQA, 2 queries a key/value head", "30 query rows"),
}


@pytest.mark.parametrize("name", UNSAID)
def test_without_a_config_what_no_shape_tells_is_unknown(tmp_path, name):
    shapes, design, said = UNSAID[name]
    found = inspected(saved(tmp_path, tensors(shapes)))
    (attention,) = found["attention"]
    assert (attention["design"], attention["num_heads"], attention["head_dim"]) == (
        design,
        None,
        None,
    )
    assert said in attention["doubts"][0]
    assert "no config.json" in found["notes"][0]


def test_what_cannot_be_read_is_said_and_not_guessed(tmp_path):
    saved(tmp_path, tensors({"h.0.attn.c_attn.weight": (30, 90)}), {"n_head": N})
    (attention,) = inspected(tmp_path)["attention"]
    assert attention["design"] == "unknown"
    assert "GPT-2 and GPTBigCode differ" in attention["doubts"][0]


def test_ties_and_wrappers_are_told(tmp_path):
    made = {f"module.{key}": array for key, array in tensors(bert()).items()}
    made["module.head.weight"] = made["module.encoder.layer.0.attention.self.query.weight"]
    save_checkpoint(tmp_path / "model.safetensors", made)
    found = inspected(tmp_path)
    (pair,) = found["tied"].items()
    assert {*pair} == {"module.head.weight", "module.encoder.layer.0.attention.self.query.weight"}
    assert any("torch.nn.DataParallel" in note for note in found["notes"])
    assert found["attention"][0]["places"] == ["encoder.layer.0.attention"]


BAD = {
    "nothing there": (lambda f: f / "gone", "gone"),
    "an empty folder": (lambda f: f, "*.safetensors"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_checkpoint_is_one_message(tmp_path, name):
    make, said = BAD[name]
    done = CliRunner().invoke(main, ["inspect", str(make(tmp_path))])
    assert done.exit_code == 2
    assert said in done.stderr
