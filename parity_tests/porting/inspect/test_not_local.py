"""Names on the Hub and adapters: every way in gives the command that makes a local checkpoint."""

import numpy as np
import pytest

from helpers.transfer.port_cases import LLAMA, llama, source_of
from helpers.transfer.ways_in import WAYS, refusal
from jax_attn.transfer import TransferError, load_checkpoint, save_checkpoint

NAMES = (
    "org/some-model_1.5",
    "hf://org/some-model_1.5",
    "https://huggingface.co/org/some-model_1.5",
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_name_on_the_hub_is_answered_with_its_download(name, way, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = " ".join(refusal(way, name).split())
    assert "does not exist; nothing is downloaded" in text
    assert "hf download org/some-model_1.5 --local-dir some-model_1.5; then pass" in text


# Paths that are none, and no names on the Hub either.
MISTYPED = ("model.safetensors", "runs/model", "/org/model", "a/b/c", "org/a model")


@pytest.mark.parametrize("path", MISTYPED)
def test_a_mistyped_path_is_not_taken_for_a_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for way in WAYS.keys() & {"port", "verify", "load_checkpoint"}:
        assert "hf download" not in refusal(way, path)


FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def test_a_folder_of_such_a_name_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    save_checkpoint("org/model/model.safetensors", {"a": np.zeros(3, np.float32)})
    assert [*load_checkpoint("org/model")] == ["a"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("has_config", [True, False])
def test_an_adapter_is_answered_with_its_merging(has_config, way, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = source_of(tmp_path, llama(), LLAMA if has_config else None)
    (source / "model.safetensors").rename(source / "adapter_model.safetensors")
    (source / "adapter_config.json").write_text("{}")
    text = " ".join(refusal(way, source).split())
    assert "got the folder of an adapter: adapter_config.json, adapter_model.safetensors" in text
    merged = f"AutoPeftModelForCausalLM.from_pretrained('{source}').merge_and_unload()"
    assert f"{merged}.save_pretrained('source-merged')" in text


@pytest.mark.parametrize("file", FILES)
def test_each_file_of_an_adapter_gives_it_away(file, tmp_path):
    (tmp_path / file).write_text("{}")
    for path in (tmp_path, tmp_path / file):
        with pytest.raises(TransferError, match="merge_and_unload"):
            load_checkpoint(path)
