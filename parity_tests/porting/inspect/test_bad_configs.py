"""A config.json that is no file, or has values that no model has: every way in says so by name."""

import json
import math
import os

import pytest
from click.testing import CliRunner

from helpers.transfer.port_cases import LLAMA, llama, source_of
from helpers.transfer.ways_in import WAYS, refusal
from jax_attn.cli import main


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return source_of(tmp_path, llama(), LLAMA)


# Those that read a config.
OF_CONFIGS = [way for way in WAYS if way != "load_checkpoint"]
PLACES = {
    "a folder": (os.mkdir, "it is a folder, not a file"),
    "a named pipe": (os.mkfifo, "it is a named pipe, not a file"),
    "a link in a circle": (
        lambda path: os.symlink(path, path),
        "it is a broken link",
    ),
    "a link to nothing": (
        lambda path: os.symlink("gone", path),
        "it is a broken link",
    ),
}


@pytest.mark.parametrize("way", OF_CONFIGS)
@pytest.mark.parametrize("kind", PLACES)
def test_what_is_no_file_is_told_before_it_is_opened(kind, way, source):
    make, words = PLACES[kind]
    (source / "config.json").unlink()
    make(source / "config.json")
    text = " ".join(refusal(way, source).split())
    assert f"'{source}/config.json': expected JSON: {words}" in text


@pytest.mark.parametrize("kind", PLACES)
def test_so_is_an_index(kind, tmp_path):
    make, words = PLACES[kind]
    make(tmp_path / "model.safetensors.index.json")
    text = " ".join(refusal("inspect", tmp_path).split())
    assert "model.safetensors.index.json': expected a JSON object with a weight_map" in text
    assert words in text


# What is written into the config -> what is said of it, beside its name.
VALUES = {
    "an epsilon that is a word": ({"rms_norm_eps": "x"}, "expected a number above 0, got 'x'"),
    "an epsilon that is no number": (
        {"rms_norm_eps": math.nan},
        "expected a number above 0, got nan",
    ),
    "another family's epsilon": ({"layer_norm_eps": "x"}, "expected a number above 0, got 'x'"),
    "an activation that is a number": ({"hidden_act": 3}, "expected one of gelu, "),
    "no number of heads": (
        {"num_attention_heads": None},
        "expected a whole number ≥ 1, got None",
    ),
}
QUANTIZED = (
    {"quantization_config": {"bits": 4}},
    "expected null, as only plain numbers are supported (float16, bfloat16, float32, float64); "
    "dequantize them in transformers, AutoModelForCausalLM.from_pretrained(PATH).dequantize()",
)


@pytest.mark.parametrize("way", OF_CONFIGS)
@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_refused_by_its_field(value, way, source):
    change, words = VALUES[value]
    (source / "config.json").write_text(json.dumps(LLAMA | change))
    (name,) = change
    assert f"'config.json {name}': {words}" in " ".join(refusal(way, source).split())


@pytest.mark.parametrize("way", [way for way in OF_CONFIGS if way not in ("inspect", "layout_for")])
@pytest.mark.parametrize("kind", ["llama", "of no known family"])
def test_quantized_weights_are_refused_with_what_makes_them_plain(kind, way, source):
    """But `inspect` describes them."""
    change, words = QUANTIZED
    (source / "config.json").write_text(json.dumps(LLAMA | change | {"model_type": kind}))
    text = " ".join(refusal(way, source).split())
    if not (way == "models.load" and kind != "llama"):  # whose model_type is told alone
        assert f"'config.json quantization_config': {words}" in text
    assert CliRunner().invoke(main, ["inspect", str(source)]).exit_code == 0


def test_all_that_is_wrong_is_told_at_once(source):
    change = {"rms_norm_eps": "x", "hidden_act": 3} | QUANTIZED[0]
    (source / "config.json").write_text(json.dumps(LLAMA | change))
    for way in WAYS.keys() & {"port", "verify", "models.load"}:
        text = refusal(way, source)
        assert [name for name in change if f"config.json {name}" not in text] == [], way
