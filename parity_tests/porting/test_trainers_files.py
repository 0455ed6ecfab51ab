"""Files of trainers: weights under an entry, behind a prefix, next to the trainer's own state."""

import json

import numpy as np
import pytest
import torch
import transformers as tf
from click.testing import CliRunner

from jax_attn import models
from jax_attn.cli import main
from jax_attn.transfer import TransferError, flatten

SMALL = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4}


def llama():
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, num_key_value_heads=2))


def bert():
    return tf.BertForMaskedLM(tf.BertConfig(**SMALL))


OTHERS = {"epoch": 3, "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0)}}}]}
# name -> model, what the file holds for its state dict, the options that read it
TRAINERS = {
    "Lightning": (llama, lambda state: OTHERS | {"state_dict": state}, "state_dict", "model."),
    "Lightning, a name of one's own": (
        llama,
        lambda state: OTHERS | {"state_dict": state},
        "state_dict",
        "net.",
    ),
    "a root of the family's own": (
        bert,
        lambda state: OTHERS | {"state_dict": state},
        "state_dict",
        "model.",
    ),
    "Fabric": (
        llama,
        lambda state: {"model": state, "optimizer": {"state": {}, "param_groups": []}},
        "model",
        "",
    ),
    "Composer": (
        llama,
        lambda state: {"state": {"model": state, "run_name": "a"}, "rng": [1]},
        "state.model",
        "model.",
    ),
    "a loss next to the weights": (
        llama,
        lambda state: OTHERS | {"best_loss": torch.tensor(0.5), "state_dict": state},
        "state_dict",
        "model.",
    ),
    "a prefix of two parts": (llama, lambda state: state, None, "task.model."),
}


@pytest.fixture(params=TRAINERS)
def trained(request, tmp_path):
    """(folder, options as arguments of Python, the same weights as transformers saves them)."""
    make, file_of, part, strip = TRAINERS[request.param]
    torch.manual_seed(0)
    model = make()
    plain, folder = tmp_path / "plain", tmp_path / "trained"
    model.save_pretrained(plain)
    folder.mkdir()
    model.config.save_pretrained(folder)
    state = {f"{strip}{key}": value for key, value in model.state_dict().items()}
    torch.save(file_of(state), folder / "last.ckpt")
    return folder, {"part": part, "strip": strip}, plain


def options_of(given):
    return [word for name, value in given.items() if value for word in (f"--{name}", value)]


def run(*words):
    return CliRunner().invoke(main, [*map(str, words)])


def same(first, second):
    first, second = flatten(first), flatten(second)
    assert first.keys() == second.keys()
    return all(np.array_equal(first[path], second[path]) for path in first)


@pytest.mark.slow
def test_the_options_read_what_transformers_would(trained, tmp_path):
    folder, given, plain = trained
    want = models.load(plain)
    assert same(models.load(folder, **given), want)
    out = tmp_path / "out"
    done = run("port", folder, out, "--to", "flax", *options_of(given))
    assert done.exit_code == 0, done.output
    assert same(models.load(out), want)


def test_inspect_reads_them_and_prints_the_call_that_does(trained):
    folder, given, plain = trained
    found, want = (
        json.loads(run("inspect", path, "--json", *words).stdout)
        for path, words in ((folder, options_of(given)), (plain, []))
    )
    assert (found["family"], found["attention"]) == (want["family"], want["attention"])
    assert found["tied"].keys() >= want["tied"].keys()
    arguments = "".join(f", {name}={value!r}" for name, value in given.items() if value)
    tree = run("inspect", folder, *options_of(given)).stdout
    call = f"models.load({str(folder)!r}{arguments})"
    assert call.replace(" ", "") in "".join(tree.replace("│", "").split())  # it may be folded


def refused(read, folder, given):
    """The words of a refusal: of Python, or of a command."""
    if read == "load":
        with pytest.raises(TransferError) as refusal:
            models.load(folder, **given)
        return str(refusal.value)
    rest = [folder.with_name("never"), "--to", "flax"] if read == "port" else []
    done = run(read, folder, *rest, *options_of(given))
    assert done.exit_code == 2
    assert not folder.with_name("never").exists()
    return done.output


@pytest.mark.parametrize("read", ["load", "inspect", "port"])
def test_each_refusal_names_the_option_that_is_missing(trained, read):
    folder, given, _ = trained
    if part := given["part"]:
        said = refused(read, folder, {})
        assert f"--part {part}" in said
        assert f"part={part!r}" in said
    if strip := given["strip"]:
        said = refused(read, folder, {"part": part})
        assert f"--strip {strip}" in said
        assert f"strip={strip!r}" in said
        assert "missing" not in said  # what the prefix alone makes missing


BAD = {
    "no such entry": ({"part": "state_dit", "strip": "model."}, "nearest: state_dict"),
    "an entry within no mapping": ({"part": "epoch.a", "strip": ""}, "part: expected one of"),
    "no such prefix": ({"part": "state_dict", "strip": "modle."}, "nearest: model."),
}


@pytest.mark.parametrize("read", ["load", "inspect", "port"])
@pytest.mark.parametrize("name", BAD)
def test_a_wrong_option_is_refused_by_name(tmp_path, name, read):
    model = llama()
    model.config.save_pretrained(tmp_path)
    state = {f"model.{key}": value for key, value in model.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "last.ckpt")
    given, said = BAD[name]
    assert said in refused(read, tmp_path, given)


def test_the_flax_side_of_a_port_has_neither(tmp_path):
    llama().save_pretrained(tmp_path / "plain")
    models.save(models.load(tmp_path / "plain"), tmp_path / "out", to="flax")
    with pytest.raises(TransferError, match="neither part= nor strip="):
        models.load(tmp_path / "out", strip="model.")
    assert (
        run("port", tmp_path / "out", tmp_path / "back", "--to", "torch", "--part", "a").exit_code
        == 2
    )


def test_a_starting_table_names_the_options_of_its_port(tmp_path):
    state = {f"net.{key}": torch.ones(5, 5) for key in ("a.weight", "b.weight")}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "last.ckpt")
    options, table = ["--part", "state_dict", "--strip", "net."], tmp_path / "table.py"
    done = run("inspect", tmp_path / "last.ckpt", *options, "--table", table)
    assert done.exit_code == 0, done.output
    assert f"LAYOUT {' '.join(options)}" in table.read_text()
    assert "net." not in table.read_text().replace(" ".join(options), "")
