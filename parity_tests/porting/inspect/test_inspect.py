"""`jax-attn inspect` on every family, as transformers writes it: family, heads, packing, ties."""

import json

import pytest
import torch
import transformers as tf
from click.testing import CliRunner

from helpers.families.family_models import GROUPED, ROWS, N
from helpers.transfer.torch_checkpoints import bert, llama, saved, tensors
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


def test_experts_are_told_where_there_are_several(tmp_path):
    experts = GROUPED | {"num_local_experts": 5, "num_experts_per_tok": 2}
    tf.MixtralForCausalLM(tf.MixtralConfig(**experts)).save_pretrained(tmp_path / "some")
    tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)).save_pretrained(tmp_path / "none")
    some = {"number": 5, "chosen": 2, "are_normalized": True}
    assert [inspected(tmp_path / name)["experts"] for name in ("some", "none")] == [some, None]
    text = CliRunner().invoke(main, ["inspect", str(tmp_path / "some")]).stdout
    assert "experts: 5 a layer, 2 for each token" in text


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
    assert {*pair} == {"head.weight", "encoder.layer.0.attention.self.query.weight"}
    assert any("torch.nn.DataParallel" in note for note in found["notes"])
    assert found["attention"][0]["places"] == ["encoder.layer.0.attention"]


def test_a_tie_of_a_head_that_is_not_there_is_none(tmp_path):
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 20}
    config = tf.BertConfig(num_hidden_layers=1, vocab_size=31, num_labels=3, **sizes)
    tf.BertForSequenceClassification(config).save_pretrained(tmp_path)
    assert inspected(tmp_path)["tied"] == {}


def test_a_tie_that_only_the_config_says_is_told_as_such(tmp_path):
    row = ROWS["gpt2"]
    held = {key: t.clone() for key, t in row.model(row.config).state_dict().items()}
    saved(tmp_path, held, row.config.to_dict())
    found = inspected(tmp_path)
    assert "lm_head.weight" not in found["tied"]
    assert any("stored separately: lm_head.weight" in note for note in found["notes"])


HIDDEN = {
    "sparse": (torch.Tensor.to_sparse, "call .to_dense() first"),
    "without values": (lambda t: t.to("meta"), "which has no values"),
}


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("command", ["inspect", "port"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_tensor_that_cannot_be_read_is_said_with_its_reason(tmp_path, name, command, whole):
    change, said = HIDDEN[name]
    model = tf.LlamaForCausalLM(config := tf.LlamaConfig(**GROUPED))
    held, key = model.state_dict(), "model.layers.0.self_attn.q_proj.weight"
    held = {k: t for k, t in held.items() if whole or ".1.self_attn.k_proj" not in k}
    torch.save(held | {key: change(held[key])}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    options = (str(tmp_path / "flax"), "--to", "flax") if command == "port" else ()
    done = CliRunner().invoke(main, [command, str(tmp_path), *options])
    assert done.exit_code == (0 if whole and command == "inspect" else 2)
    text = " ".join((done.stderr if done.exit_code else done.stdout).split())
    assert said in text.replace("│ ", "")
    assert "q_proj.kernel" not in text
    assert whole or "k_proj.kernel" in text or "k_proj.weight" in text


def test_a_dtype_that_numpy_lacks_stops_no_one(tmp_path):
    model = tf.GPT2LMHeadModel(config := ROWS["gpt2"].config)
    scales = torch.ones(3).to(torch.float8_e8m0fnu)
    torch.save(model.state_dict() | {"scales": scales}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    found = inspected(tmp_path)
    assert found["dtypes"]["float8_e8m0fnu"] == {"tensors": 1, "bytes": 3}
    assert {*found["tied"]} == {"lm_head.weight"}


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
