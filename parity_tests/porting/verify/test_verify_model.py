"""`jax-attn verify CHECKPOINT`: the whole model, and where there is no model."""

import importlib.util
import json
import shutil

import numpy as np
import pytest
import torch
import transformers as hf

from helpers.families.whole_models import SmallModel
from helpers.transfer.torch_checkpoints import FAIL, INCONCLUSIVE, PASS, USAGE, said, verify
from jax_attn.environment import install_line
from jax_attn.parity.run.inputs_and_runs import RaisedError
from jax_attn.porting.verify import translated, whole
from jax_attn.transfer import load_checkpoint, save_checkpoint
from jax_attn.translate import pretrained

ENVIRONMENT = 3


def changed(case: SmallModel, to, **fields):
    """A copy of a case's folder, whose config has other fields."""
    folder = shutil.copytree(case.folder, to / "model")
    (folder / "config.json").write_text(json.dumps(case.config | fields))
    return folder


# --- the whole model ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_is_verified_whole_by_default(small):
    done = verify(small("gpt2").folder, "--json")
    assert done.exit_code == PASS, done.output
    found = json.loads(done.stdout)
    assert [case["name"] for case in found["cases"]] == ["model, float32", "model, bfloat16"]
    for case in found["cases"]:
        assert (case["design"], case["variant"]) == ("gpt2", "GPT2LMHeadModel")
        assert "verified the whole model against transformers" in case["notes"][0]
        assert "by lengths, by a mask, by a cache" in case["notes"][0]
        tensors = case["tensors"]
        ways = ("", " by lengths", " by a cache")
        assert {f"{name}{way}" for name in ("hidden", "logits") for way in ways} <= tensors.keys()
        gradients = {name.removeprefix("grad ") for name in tensors if name.startswith("grad ")}
        assert gradients == dict(small("gpt2").pair.reference.named_parameters()).keys()


@pytest.mark.slow
@pytest.mark.usefixtures("outputs_alone")
def test_a_file_that_differs_from_what_transformers_reads_is_not_passed(small, monkeypatch):
    """A table that swaps two norms: both sides load without an error, and the verdict is FAIL."""
    load = whole.ModelPair.of

    def swapped(*args):
        pair = load(*args)
        block = pair.port.layers[0]
        block.attention_norm, block.mlp_norm = block.mlp_norm, block.attention_norm
        return pair

    monkeypatch.setattr(whole.ModelPair, "of", swapped)
    done = verify(small("gpt2").folder)
    assert done.exit_code == FAIL
    assert "ln_1.weight" in done.output


def test_without_transformers_nothing_is_claimed(small, monkeypatch):
    find = importlib.util.find_spec

    def found(name):
        return None if name == "transformers" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    done = verify(small("gpt2").folder)
    assert done.exit_code == INCONCLUSIVE
    words = " ".join(done.output.split())
    assert f"transformers is not installed: {install_line('hf')}" in words
    assert "--attention verifies only the attention" in words


@pytest.mark.slow
def test_more_than_memory_holds_is_refused_before_the_check(small, monkeypatch):
    monkeypatch.setattr(pretrained, "free_memory", lambda: 2**20)
    done = verify(small("gpt2").folder)
    assert done.exit_code == ENVIRONMENT
    assert "GiB are free" in done.output
    assert "--layers 0" in done.output


# case, tensors that its file lacks, words of the error
LACKING = {
    "a head": ("llama", ("lm_head.weight",), "lm_head"),
    "a pooler, which ours can do without": (
        "bert, a pooler",
        ("pooler.dense.weight", "pooler.dense.bias"),
        "by transformers",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LACKING)
def test_what_transformers_would_draw_at_random_is_refused(name, small, tmp_path):
    case, keys, words = LACKING[name]
    folder = tmp_path / "model"
    shutil.copytree(small(case).folder, folder)
    tensors = {k: x for k, x in load_checkpoint(folder).items() if k not in keys}
    save_checkpoint(folder / "model.safetensors", tensors)
    done = verify(folder, "--model")
    assert done.exit_code == USAGE
    assert words in done.output
    assert keys[0] in done.output


@pytest.mark.slow
@pytest.mark.usefixtures("outputs_alone")
def test_heads_that_transformers_leaves_out_are_not_compared(small, tmp_path):
    """BERT's published files have the heads of pre-training and name a masked language model."""
    case = small("bert, for two sentences")
    done = verify(changed(case, tmp_path, architectures=["BertForMaskedLM"]), "--json")
    assert done.exit_code == PASS, done.output
    (case,) = json.loads(done.stdout)["cases"]
    about = said(case, "about-checkpoint")
    assert any("BertForMaskedLM" in note and ": pooler, seq_r" in note for note in about)


@pytest.mark.slow
@pytest.mark.parametrize("pad", [-1, 41])
@pytest.mark.usefixtures("outputs_alone")
def test_a_padding_token_outside_the_vocabulary(pad, small, tmp_path):
    done = verify(changed(small("gpt2"), tmp_path, pad_token_id=pad))
    assert done.exit_code == PASS, done.output


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "status"), [((), PASS), (("--model",), USAGE)])
def test_a_file_that_transformers_does_not_find_by_itself(asked, status, small, tmp_path):
    file = tmp_path / "weights.safetensors"
    shutil.copy(small("gpt2").folder / "model.safetensors", file)
    shutil.copy(small("gpt2").folder / "config.json", tmp_path)
    done = verify(file, *asked)
    assert done.exit_code == status, done.output
    assert f"pass {tmp_path}" in " ".join(done.stderr.split())


def test_a_folder_without_a_config(small, tmp_path):
    shutil.copy(small("gpt2").folder / "model.safetensors", tmp_path)
    done = verify(tmp_path, "--model")
    assert done.exit_code == USAGE
    assert "expected a config.json beside the tensors" in " ".join(done.output.split())


@pytest.mark.slow
def test_a_class_that_is_no_model_is_refused(small, tmp_path):
    folder = changed(small("gpt2"), tmp_path, architectures=["GPT2Config"])
    done = verify(folder, "--model")
    assert done.exit_code == USAGE
    assert "architectures" in done.output


@pytest.mark.slow
@pytest.mark.parametrize("field", [{"initializer_range": 2.0}, {"attention_dropout": "0.0"}])
def test_a_config_that_transformers_refuses(field, small, tmp_path):
    """By an error of huggingface_hub's own; status 1 would say that parity failed."""
    done = verify(changed(small("llama"), tmp_path, **field), "--model")
    assert done.exit_code == USAGE, done.output
    words = " ".join(done.output.split())
    assert "transformers raises StrictDataclassFieldValidationError: " in words
    assert f"field '{next(iter(field))}'" in words


@pytest.mark.slow
def test_keys_of_a_wrapper_are_told_with_what_strips_them(small, tmp_path):
    folder = changed(small("gpt2"), tmp_path)
    tensors = {f"module.{key}": x for key, x in load_checkpoint(folder).items()}
    save_checkpoint(folder / "model.safetensors", tensors)
    done = verify(folder, "--model")
    assert done.exit_code == USAGE
    assert "jax-attn port IN OUT --to flax --strip module.;" in " ".join(done.output.split())


# what rows of 13 tokens are too short for -> case, fields of its config, the status
BEYOND = {
    "the window of 17": ("mistral", {"sliding_window": 17}, INCONCLUSIVE),
    "dynamic NTK, which begins after 19": (
        "llama",
        {
            "max_position_embeddings": 19,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0},
        },
        PASS,
    ),
    "the biases of distances up to 29": (
        "t5, its encoder",
        {"relative_attention_max_distance": 29},
        PASS,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("beyond", BEYOND)
@pytest.mark.usefixtures("outputs_alone")
def test_what_short_rows_do_not_exercise_is_said(beyond, small, tmp_path):
    case, fields, status = BEYOND[beyond]
    done = verify(changed(small(case), tmp_path, **fields), "--model")
    assert done.exit_code == status, done.output
    words = " ".join(done.output.split())
    assert f"note: rows of 13 tokens are too short for {beyond}" in words


# --- where there is no model --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--num-heads", "4")])
def test_attention_is_verified_where_there_is_no_model(options, small, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "free_memory", lambda: 0)  # too little to translate it
    change = {"unheard_of": True} if not options else {}
    folder = changed(small("gpt2"), tmp_path, **change)
    done = verify(folder, *options, "--json")
    assert done.exit_code == PASS, done.output
    cases = json.loads(done.stdout)["cases"]
    assert [case["name"] for case in cases] == [f"transformer.h.{i}.attn" for i in range(2)]
    for text in (done.stderr, str(cases[0]["notes"])):
        for word in ("unheard_of", "causality", "GiB are free"):
            assert (word in text) == (not options)


@pytest.mark.slow
def test_a_model_that_is_not_ours_is_translated_and_verified_whole(tmp_path):
    config = hf.T5Config(d_model=12, d_kv=5, d_ff=14, num_layers=1, num_heads=2, vocab_size=29)
    config.relative_attention_num_buckets, config.relative_attention_max_distance = 6, 7
    torch.manual_seed(0)
    hf.T5ForTokenClassification(config).save_pretrained(tmp_path)
    done = verify(tmp_path, "--json")
    assert done.exit_code == PASS, done.output
    (case,) = json.loads(done.stdout)["cases"]
    assert case["name"] == "translation, float32"
    assert any("T5ForTokenClassification" in note for note in said(case, "about-checkpoint"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "is_refused"), [(RaisedError("port: raises"), True), (RuntimeError("ours"), False)]
)
def test_only_what_a_translation_refuses_falls_back_to_attention(
    error, is_refused, small, tmp_path, monkeypatch
):
    def verify_translated(path, *, explain):
        raise error

    monkeypatch.setattr(translated, "verify_translated", verify_translated)
    done = verify(changed(small("gpt2"), tmp_path, unheard_of=True))
    assert done.exit_code == (PASS if is_refused else 1), done.output
    assert ("it cannot be translated: port: raises" in done.output) == is_refused
    assert is_refused or done.exception is error


def test_but_not_if_the_model_is_asked_for(small, tmp_path):
    folder = changed(small("gpt2"), tmp_path, unheard_of=True)
    for asked in (("--model",), ("--layers", "0")):
        done = verify(folder, *asked)
        assert done.exit_code == USAGE
        assert "unheard_of" in done.output


SCOPES = {
    "two scopes": (("--model", "--attention"), "expected one of --model, --layers, --attention"),
    "heads of a model": (("--model", "--num-heads", "4"), "--num-heads: goes with --attention"),
    "no checkpoint": (("--model",), "--model: goes with CHECKPOINT"),
}


@pytest.mark.parametrize("name", SCOPES)
def test_options_that_do_not_go_together_are_refused(name, small):
    options, words = SCOPES[name]
    checkpoint = () if name == "no checkpoint" else (small("gpt2").folder,)
    done = verify(*checkpoint, *options)
    assert done.exit_code == USAGE
    assert words in " ".join(done.output.split())


def test_tokens_are_of_the_vocabulary_and_padding_is_on_both_sides(small):
    inputs = small("roberta").pair.inputs
    assert inputs["tokens"].max() < small("roberta").config["vocab_size"]
    assert [row[0] for row in inputs["mask"]] == [1, 1, 0]
    assert [row[-1] for row in inputs["mask"]] == [1, 0, 1]
    assert (np.diff(inputs["mask"][1]) <= 0).all()
