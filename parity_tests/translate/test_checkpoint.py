"""Folders of transformers: their models, the inputs that are made, sizes, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.utils import logging

from jax_attn.transfer import TransferError, load_checkpoint, save_checkpoint
from jax_attn.translate import TranslationError, pretrained
from jax_attn.translate.checkpoint import axes_of, model_of, translate_any_size

logging.disable_progress_bar()

TEXT = {
    "vocab_size": 97,
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 19,
    "bos_token_id": 94,
    "eos_token_id": 95,
    "projection_dim": 11,
}
VISION = {
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 14,
    "patch_size": 7,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A text encoder, and a model that has one beside another part."""
    folder = tmp_path_factory.mktemp("folders")
    torch.manual_seed(0)
    hf.CLIPTextModel(hf.CLIPTextConfig(**TEXT)).save_pretrained(folder / "text")
    both = hf.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=11)
    hf.CLIPModel(both).save_pretrained(folder / "both")
    return folder


@pytest.fixture
def changed(folders, tmp_path):
    """Copy the text encoder with another config, and other tensors."""

    def change(fields=(), drop=(), add=()):
        folder = shutil.copytree(folders / "text", tmp_path / "changed")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | dict(fields)))
        tensors = {k: x for k, x in load_checkpoint(folder).items() if k not in drop} | dict(add)
        save_checkpoint(folder / "model.safetensors", tensors)
        return folder

    return change


@pytest.mark.slow
def test_a_model_is_read_with_its_weights_and_inputs_whose_sizes_vary(folders):
    model = model_of(folders / "text")
    assert type(model.module) is hf.CLIPTextModel
    assert not model.module.training
    with load_checkpoint(folders / "text") as tensors:
        for key, tensor in model.module.state_dict().items():
            np.testing.assert_array_equal(tensor.numpy(), tensors[key])
    assert [*model.inputs] == ["input_ids", "attention_mask"]  # it counts positions by itself
    varied = translate_any_size(model.module, model.inputs)
    assert varied.dynamic == {name: {0: "B", 1: "T"} for name in model.inputs}
    assert (varied.fixed, model.notes, varied.notes) == ((), (), ())


def test_a_part_is_read_and_the_rest_is_told(folders):
    model = model_of(folders / "both", "vision_model")
    assert [*model.inputs] == ["pixel_values"]
    assert model.inputs["pixel_values"].shape[1:] == (3, 14, 14)
    (note,) = model.notes
    assert "text_model" in note
    assert "vision_model" not in note


def test_tensors_that_the_model_does_not_have_are_told(changed):
    folder = changed(add={"head.weight": np.ones((3, 5), np.float32)})
    found = pretrained.pretrained(folder)
    assert found.unexpected == ("head.weight",)
    assert "head.weight" in found.notes[0]


KEY = "final_layer_norm.weight"
# name -> fields of the config, tensors that the file lacks, the part, what is named
REFUSED = {
    "a missing tensor": ({}, (KEY,), None, KEY),
    "code in the folder": ({"auto_map": {"AutoModel": "own.Model"}}, (), None, "auto_map"),
    "no class of transformers": ({"architectures": ["Unheard"]}, (), None, "architectures"),
    "a class that is no model": ({"architectures": ["CLIPTextConfig"]}, (), None, "architectures"),
    "quantized": ({"quantization_config": {"bits": 4}}, (), None, "quantization_config"),
    "no such part": ({}, (), "text", "part"),
    "diffusers, not installed": ({"_class_name": "UNet2DModel"}, (), None, "changed"),
    "a folder of timm": ({"architecture": "vit_tiny"}, (), None, "architecture"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused(name, changed, monkeypatch):
    fields, drop, part, named = REFUSED[name]
    library = name.partition(",")[0]
    present = pretrained.present
    monkeypatch.setattr(pretrained, "present", lambda module: module != library and present(module))
    folder = changed(fields, drop)
    with pytest.raises(TransferError) as refused:
        model_of(folder, part)
    problems = refused.value.problems
    assert any(named in problem.name for problem in problems)
    if "installed" in name:
        assert problems[0].hint == f"pip install {library}"


def test_a_pipeline_names_its_folders(folders, tmp_path):
    shutil.copytree(folders / "text", tmp_path / "text_encoder")
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(TransferError) as refused:
        model_of(tmp_path)
    assert "text_encoder" in refused.value.problems[0].text


def test_more_than_memory_holds_is_refused_before_a_tensor_is_read(folders, monkeypatch):
    monkeypatch.setattr(pretrained, "free_memory", lambda: 2**10)
    with pytest.raises(MemoryError, match="GiB are free"):
        model_of(folders / "text")


# --- sizes that vary ------------------------------------------------------------------------------


class FixedLength(torch.nn.Module):
    def forward(self, x):
        return x.reshape(-1, 7).cumsum(1)


class Fixed(torch.nn.Module):
    def forward(self, x):
        return x.reshape(3, 7).cumsum(1)


class Unruled(torch.nn.Module):
    def forward(self, x):
        return torch.rand_like(x)


X = np.ones((3, 7), np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kept"), [(FixedLength, {"x": {0: "B"}}), (Fixed, {})])
def test_sizes_that_a_model_fixes_are_told_and_the_others_vary(kind, kept):
    varied = translate_any_size(kind(), {"x": X})
    assert varied.dynamic == kept
    assert varied.fixed
    assert varied.notes


def test_what_no_size_changes_is_refused_at_once():
    with pytest.raises(TranslationError) as refused:
        translate_any_size(Unruled(), {"x": X})
    assert [problem.kind for problem in refused.value.problems] == ["random"]


def ones(*shape):
    return np.ones(shape, np.float32)


# name -> inputs, their axes
AXES = {
    "tokens": ({"ids": ones(3, 7), "mask": ones(3, 7)}, {"ids": "BT", "mask": "BT"}),
    "two rows of tokens": (
        {"ids": ones(3, 7), "memory": ones(3, 5)},
        {"ids": "BT", "memory": "BS"},
    ),
    "an image and a text": ({"x": ones(3, 2, 7, 5), "ids": ones(3, 7)}, {"x": "B", "ids": "BT"}),
    "other rows": ({"ids": ones(3, 7), "bias": ones(7, 7)}, {}),
    "by position": ((ones(3, 7),), {"x": "BT"}),
    "a number": ({"x": ones(3, 7), "n": ones()}, {}),
}


@pytest.mark.parametrize("name", AXES)
def test_axes_are_named_by_the_sizes_of_the_inputs(name):
    inputs, axes = AXES[name]
    expected = {name: dict(enumerate(letters)) for name, letters in axes.items()}
    assert axes_of(inputs, ["x"]) == expected
