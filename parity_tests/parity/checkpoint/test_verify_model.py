"""`jax-attn verify CHECKPOINT`: the whole model, some layers, and where there is no model."""

import importlib.util
import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

from helpers.families.whole_models import SmallModel
from jax_attn.cli import main
from jax_attn.environment import install_line
from jax_attn.parity.checkpoint import cut as cutting
from jax_attn.parity.checkpoint import pair as pair_module
from jax_attn.parity.checkpoint import whole
from jax_attn.parity.checkpoint.pair import Pair, _groups
from jax_attn.parity.judge.compare import Verdict
from jax_attn.transfer import load_checkpoint, save_checkpoint

PASS, FAIL, USAGE, ENVIRONMENT, INCONCLUSIVE = 0, 1, 2, 3, 4


def run(*args):
    return CliRunner(env={"COLUMNS": "100"}).invoke(main, ["verify", *map(str, args)])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Small models by name, each written once."""
    made = {}

    def get(name: str) -> SmallModel:
        if name not in made:
            made[name] = SmallModel(name, tmp_path_factory.mktemp("model"))
            assert made[name].config
        return made[name]

    return get


def changed(case: SmallModel, to, **fields):
    """A copy of a case's folder, whose config has other fields."""
    folder = shutil.copytree(case.folder, to / "model")
    (folder / "config.json").write_text(json.dumps(case.config | fields))
    return folder


@pytest.fixture
def quick(monkeypatch):
    """One dtype: the other is checked in the tests of models."""
    monkeypatch.setattr(whole, "DTYPES_OF_MODELS", ("float32",))


# --- the whole model ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_is_verified_whole_by_default(small):
    done = run(small("gpt2").folder, "--json")
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
@pytest.mark.usefixtures("quick")
def test_a_file_that_differs_from_what_transformers_reads_is_not_passed(small, monkeypatch):
    """A table that swaps two norms: both sides load without an error, and the verdict is FAIL."""
    load = whole.Pair.of

    def swapped(*args):
        pair = load(*args)
        block = pair.port.layers[0]
        block.attention_norm, block.mlp_norm = block.mlp_norm, block.attention_norm
        return pair

    monkeypatch.setattr(whole.Pair, "of", swapped)
    done = run(small("gpt2").folder)
    assert done.exit_code == FAIL
    assert "ln_1.weight" in done.output


def test_without_transformers_nothing_is_claimed(small, monkeypatch):
    find = importlib.util.find_spec

    def found(name):
        return None if name == "transformers" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    done = run(small("gpt2").folder)
    assert done.exit_code == INCONCLUSIVE
    words = " ".join(done.output.split())
    assert f"transformers is not installed: {install_line('hf')}" in words
    assert "--attention verifies the attention alone" in words


def test_more_than_memory_holds_is_refused_before_the_check(small, monkeypatch):
    monkeypatch.setattr(whole, "free_memory", lambda: 2**20)
    done = run(small("gpt2").folder)
    assert done.exit_code == ENVIRONMENT
    assert "GiB are free" in done.output
    assert "--layers 0" in done.output


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_gradients_compared_in_groups_are_those_compared_at_once(small):
    pair = small("bert").pair
    assert len(_groups(pair.reference, 12000)) == 2
    once, groups = pair.check(), pair.check(part=12000)
    assert {t.label for t in once.tensors} == {t.label for t in groups.tensors}
    assert len(groups.tensors) == len(once.tensors)
    assert groups.verdict is once.verdict is Verdict.PASS
    assert not any("parameters were compared" in note for note in groups.notes)


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
    done = run(folder, "--model")
    assert done.exit_code == USAGE
    assert words in done.output
    assert keys[0] in done.output


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_heads_that_transformers_leaves_out_are_not_compared(small, tmp_path):
    """BERT's published files have the heads of pre-training and name a masked language model."""
    case = small("bert, for two sentences")
    done = run(changed(case, tmp_path, architectures=["BertForMaskedLM"]), "--json")
    assert done.exit_code == PASS, done.output
    (case,) = json.loads(done.stdout)["cases"]
    assert any("BertForMaskedLM does not have them: pooler, seq_r" in x for x in case["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("pad", [-1, 41])
@pytest.mark.usefixtures("quick")
def test_a_padding_token_outside_the_vocabulary(pad, small, tmp_path):
    done = run(changed(small("gpt2"), tmp_path, pad_token_id=pad))
    assert done.exit_code == PASS, done.output


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "status"), [((), PASS), (("--model",), USAGE)])
def test_a_file_that_transformers_does_not_find_by_itself(asked, status, small, tmp_path):
    file = tmp_path / "weights.safetensors"
    shutil.copy(small("gpt2").folder / "model.safetensors", file)
    shutil.copy(small("gpt2").folder / "config.json", tmp_path)
    done = run(file, *asked)
    assert done.exit_code == status, done.output
    assert f"pass {tmp_path}" in " ".join(done.stderr.split())


def test_a_folder_without_a_config(small, tmp_path):
    shutil.copy(small("gpt2").folder / "model.safetensors", tmp_path)
    done = run(tmp_path, "--model")
    assert done.exit_code == USAGE
    assert "expected a config.json beside the tensors" in " ".join(done.output.split())


def test_a_class_that_is_no_model_is_refused(small, tmp_path):
    folder = changed(small("gpt2"), tmp_path, architectures=["GPT2Config"])
    done = run(folder, "--model")
    assert done.exit_code == USAGE
    assert "architectures" in done.output


@pytest.mark.parametrize("field", [{"initializer_range": 2.0}, {"attention_dropout": "0.0"}])
def test_a_config_that_transformers_refuses(field, small, tmp_path):
    """By an error of huggingface_hub's own; status 1 would say that parity failed."""
    done = run(changed(small("llama"), tmp_path, **field), "--model")
    assert done.exit_code == USAGE, done.output
    words = " ".join(done.output.split())
    assert "transformers raises StrictDataclassFieldValidationError: " in words
    assert f"field '{next(iter(field))}'" in words


def test_keys_of_a_wrapper_are_told_with_what_strips_them(small, tmp_path):
    folder = changed(small("gpt2"), tmp_path)
    tensors = {f"module.{key}": x for key, x in load_checkpoint(folder).items()}
    save_checkpoint(folder / "model.safetensors", tensors)
    done = run(folder, "--model")
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
}


@pytest.mark.slow
@pytest.mark.parametrize("beyond", BEYOND)
@pytest.mark.usefixtures("quick")
def test_what_short_rows_do_not_exercise_is_said(beyond, small, tmp_path):
    case, fields, status = BEYOND[beyond]
    done = run(changed(small(case), tmp_path, **fields), "--model")
    assert done.exit_code == status, done.output
    words = " ".join(done.output.split())
    assert f"note: rows of 13 tokens are too short for {beyond}" in words


# --- some layers --------------------------------------------------------------------------------

# Each family's layers, with those that only their number tells apart.
OF_LAYERS = ("bert", "gpt2", "falcon, groups", "opt, norms behind", "qwen2", "gemma2", "roberta")


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_LAYERS)
def test_each_layer_passes_alone(name, small, quick):
    results = [*whole.verify_layers(small(name).folder, small(name).config, (0, 1))]
    assert [r.name for r in results] == ["layer 0, float32", "layer 1, float32"]
    for result in results:
        result.raise_for_status()
        assert "alone, between the embedding and the last norm and head" in result.notes[0]


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_the_summary_of_layers_says_what_they_were_verified_with(small, monkeypatch):
    """Also the window that only one of them has."""
    monkeypatch.setattr(cutting, "ROWS", 17)
    monkeypatch.setattr(pair_module, "LONGEST", 4)
    done = run(small("qwen2").folder, "--layers", "0,1")
    assert done.exit_code == INCONCLUSIVE, done.output
    words = " ".join(done.output.split())
    assert "note: verified each layer alone, between the embedding and the last norm and" in words
    assert "with the first 17 of 41 tokens, against transformers" in words
    assert "note: rows of 4 tokens are too short for the window of 5" in words


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_a_cut_does_what_the_layer_does_in_its_place(name, small, tmp_path):
    """The windows of the two layers differ."""
    pair, windows = small(name).pair, []
    for layer in (0, 1):
        (folder := tmp_path / str(layer)).mkdir()
        config = cutting.cut(small(name).folder, small(name).config, layer, folder)
        traits = Pair.of(folder, config, "float32").traits
        assert traits.blocks == pair.traits.blocks[layer : layer + 1]
        windows.append(traits.blocks[0].attention.window)
    assert windows[0] != windows[1]


@pytest.mark.slow
def test_a_cut_has_the_first_rows_of_the_vocabulary(small, tmp_path, monkeypatch):
    monkeypatch.setattr(cutting, "ROWS", 17)
    config = cutting.cut(small("bert").folder, small("bert").config, 1, tmp_path)
    file, cut = load_checkpoint(small("bert").folder), load_checkpoint(tmp_path)
    assert config["vocab_size"] == 17
    rows = {key for key in cut if cut[key].shape != file[key.replace(".0.", ".1.")].shape}
    assert rows == {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"}
    for key in cut:
        whole_tensor = file[key.replace(".0.", ".1.")]
        assert cut[key].tobytes() == whole_tensor[: len(cut[key])].tobytes(), key
    assert {key for key in cut if ".layer." in key} == {
        key.replace(".1.", ".0.") for key in file if ".layer.1." in key
    }
    Pair.of(tmp_path, config, "float32").check().raise_for_status()


@pytest.mark.slow
def test_a_mistake_in_one_layer_is_found_there(small, quick, monkeypatch):
    load = whole.Pair.of

    def scaled(*args):
        pair = load(*args)
        pair.port.layers[0].attention.scale = 1.001 * pair.traits.blocks[0].attention.scale
        return pair

    monkeypatch.setattr(whole.Pair, "of", scaled)
    (result,) = whole.verify_layers(small("gemma2").folder, small("gemma2").config, (1,))
    assert result.verdict is Verdict.FAIL


LAYERS = {
    "not there, beside one that is": ("gpt2", "0,2", "expected one of the layers 0 to 1, got 2"),
    "no numbers": ("gpt2", "0,x", "such as 2,5"),
    "twice the same": ("gpt2", "1,1", "such as 2,5"),
    "none": ("gpt2", "", "such as 2,5"),
    "what depends on its number": (
        "gpt2, scaled by layer",
        "1",
        "depends on its own number (scale_attn_by_inverse_layer_idx), which a model of one layer",
    ),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.usefixtures("quick")
def test_layers_that_cannot_be_verified_alone_are_refused(name, small):
    case, layers, words = LAYERS[name]
    done = run(small(case).folder, "--layers", layers)
    assert done.exit_code == USAGE
    assert words in " ".join(done.output.split())


# --- where there is no model --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--num-heads", "4")])
def test_attention_is_verified_where_there_is_no_model(options, small, tmp_path):
    change = {"unheard_of": True} if not options else {}
    folder = changed(small("gpt2"), tmp_path, **change)
    done = run(folder, *options, "--json")
    assert done.exit_code == PASS, done.output
    cases = json.loads(done.stdout)["cases"]
    assert [case["name"] for case in cases] == [f"transformer.h.{i}.attn" for i in range(2)]
    for said in (done.stderr, str(cases[0]["notes"])):
        assert ("unheard_of" in said) == (not options)


def test_but_not_if_the_model_is_asked_for(small, tmp_path):
    folder = changed(small("gpt2"), tmp_path, unheard_of=True)
    for asked in (("--model",), ("--layers", "0")):
        done = run(folder, *asked)
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
    done = run(*checkpoint, *options)
    assert done.exit_code == USAGE
    assert words in " ".join(done.output.split())


def test_tokens_are_of_the_vocabulary_and_padding_is_on_both_sides(small):
    inputs = small("roberta").pair.inputs
    assert inputs["tokens"].max() < small("roberta").config["vocab_size"]
    assert [row[0] for row in inputs["mask"]] == [1, 1, 0]
    assert [row[-1] for row in inputs["mask"]] == [1, 0, 1]
    assert (np.diff(inputs["mask"][1]) <= 0).all()
