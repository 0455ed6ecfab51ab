"""gpt-oss as it was published, with experts in MXFP4: loaded, saved, ported and verified."""

import json

import numpy as np
import pytest
import torch
import transformers as tf
from click.testing import CliRunner

from helpers.families.whole_models import GPT_OSS
from jax_attn import models, transfer
from jax_attn.cli import main
from jax_attn.parity.judge.compare import Verdict
from jax_attn.porting.verify.source_pair import pair_of
from jax_attn.porting.verify.whole import verify_layers
from jax_attn.transfer import TransferError
from jax_attn.transfer.arrays import as_numpy
from jax_attn.translate.pretrained import read_by_transformers

QUANTIZED = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
# A scale counts for 32 numbers, so both widths are multiples of 32.
SIZES = GPT_OSS | {"hidden_size": 32, "intermediate_size": 64, "bos_token_id": 1, "eos_token_id": 2}


def drawn_bytes(shape, least, most, rng):
    return rng.integers(least, most, shape, np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as it was published: bfloat16, and MXFP4 with scales around the others' size."""
    folder, rng = tmp_path_factory.mktemp("mxfp4"), np.random.default_rng(0)
    torch.manual_seed(0)
    model = tf.GptOssForCausalLM(tf.GptOssConfig(**SIZES))
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.2)
    model.save_pretrained(folder)
    tensors = {}
    for key, array in transfer.load_checkpoint(folder).items():
        if key.endswith(("gate_up_proj", "down_proj")):
            X, fan_in, fan_out = array.shape
            tensors[f"{key}_blocks"] = drawn_bytes((X, fan_out, fan_in // 32, 16), 0, 256, rng)
            tensors[f"{key}_scales"] = drawn_bytes((X, fan_out, fan_in // 32), 122, 125, rng)
        else:
            tensors[key] = array.astype("bfloat16")
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "model.safetensors").unlink()
    transfer.save_checkpoint(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZED}))
    return folder


def state(path) -> dict[str, np.ndarray]:
    """The numbers that transformers reads from a folder, as bits."""
    model = read_by_transformers(path, tf.GptOssForCausalLM, dtype=torch.bfloat16).module
    held = {key: as_numpy(tensor) for key, tensor in model.state_dict().items()}
    return {key: a.astype("bfloat16").view(np.uint16) for key, a in held.items()}


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    assert [key for key in one if not np.array_equal(one[key], other[key])] == []


def test_what_is_saved_again_is_plain_and_has_transformers_bits(folder, tmp_path):
    model = models.load(folder)
    kernel = transfer.flatten(model)["layers.0.mlp.experts.gate.kernel"]
    theirs = state(folder)
    gate = theirs["model.layers.0.mlp.experts.gate_up_proj"][..., ::2]
    assert np.array_equal(np.asarray(kernel).view(np.uint16), gate)
    models.save(model, tmp_path / "torch")
    assert "quantization_config" not in json.loads((tmp_path / "torch/config.json").read_text())
    assert_same_bits(state(tmp_path / "torch"), theirs)


def test_a_port_there_and_back_is_plain_and_has_transformers_bits(folder, tmp_path):
    def port(source, target, to):
        arguments = ["port", str(source), str(target), "--to", to]
        return CliRunner().invoke(main, arguments, catch_exceptions=False)

    flax, back = tmp_path / "flax", tmp_path / "back"
    there = port(folder, flax, "flax")
    assert there.exit_code == 0, there.output
    assert "MXFP4" in there.stderr
    assert port(flax, back, "torch").exit_code == 0
    assert_same_bits(state(back), state(folder))
    for path, array in transfer.flatten(models.load(flax)).items():
        assert np.array_equal(array, transfer.flatten(models.load(folder))[path])


@pytest.mark.slow
def test_it_agrees_with_transformers_which_reads_the_same_bytes(folder):
    pair = pair_of(folder, json.loads((folder / "config.json").read_text()), "float32")
    assert pair.check().verdict is Verdict.PASS


@pytest.mark.slow
def test_a_layer_that_is_cut_out_keeps_its_bytes(folder):
    """One layer and one dtype of what `verify --layers` compares."""
    config = json.loads((folder / "config.json").read_text())
    result = next(verify_layers(folder, config, (1,)))
    assert result.verdict is Verdict.PASS


REFUSED = {
    "another method": {"quant_method": "awq"},
    "an unknown field": QUANTIZED | {"bits": 3},
}


@pytest.mark.parametrize("says", REFUSED)
def test_other_quantized_weights_are_refused_by_name(says, folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = REFUSED[says]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(TransferError) as caught:
        models.load(tmp_path)
    assert {p.name for p in caught.value.problems} == {"config.json quantization_config"}
