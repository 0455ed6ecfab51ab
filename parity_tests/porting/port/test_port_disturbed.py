"""A source that is cut, changed or damaged while it is read: said in one piece, nothing kept."""

import os
import re
import shutil

import numpy as np
import pytest
import torch

from helpers.transfer.port_cases import LLAMA, llama, ported, source_of
from jax_attn.porting.port import carry_and_prove
from jax_attn.transfer import TransferError, load_checkpoint, save_checkpoint
from jax_attn.transfer.files import port_folder

TENSORS = {"a.weight": np.arange(35.0).reshape(5, 7), "b.weight": np.arange(3.0)}


def as_pickle(folder):
    torch.save({key: torch.tensor(held) for key, held in TENSORS.items()}, folder / "model.bin")


FORMS = {
    "one file": lambda folder: save_checkpoint(folder / "model.safetensors", TENSORS),
    "shards": lambda folder: save_checkpoint(
        folder / "model.safetensors", TENSORS, shard_bytes=100
    ),
    "torch's pickle": as_pickle,
}


@pytest.mark.parametrize("name", FORMS)
def test_a_file_that_is_cut_is_not_looked_at(tmp_path, name):
    """Looking at mapped bytes that are no longer there would end the process."""
    FORMS[name](tmp_path)
    with load_checkpoint(tmp_path) as checkpoint:
        for path in [*tmp_path.glob("*.safetensors"), *tmp_path.glob("*.bin")]:
            os.truncate(path, 10)
        for key in TENSORS:
            with pytest.raises(TransferError, match=rf"{key}.*was \d+ bytes, is now 10"):
                checkpoint[key]


def test_a_file_that_was_replaced_is_read_as_it_was(tmp_path):
    FORMS["one file"](tmp_path)
    with load_checkpoint(tmp_path) as checkpoint:
        save_checkpoint(tmp_path / "model.safetensors", {"a.weight": np.ones(1)})
        np.testing.assert_array_equal(checkpoint["a.weight"], TENSORS["a.weight"])


def written_to(folder):
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"once")


def replaced(folder):
    shutil.copy(folder / "model.safetensors", folder / "other")
    os.replace(folder / "other", folder / "model.safetensors")


DISTURBED = {
    "written to": (written_to, "model.safetensors", "it was written to"),
    "replaced": (replaced, "model.safetensors", "another file has its name"),
    "gone": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors", "it is gone"),
    "another config": (
        lambda f: (f / "config.json").write_text("{}"),
        "config.json",
        "bytes, is now 2",
    ),
    "a record that was not there": (
        lambda f: (f / "port.json").write_text("{}"),
        "port.json",
        "it was not there",
    ),
}


@pytest.fixture
def source(tmp_path):
    return source_of(tmp_path, llama(), LLAMA)


@pytest.mark.parametrize("name", DISTURBED)
def test_a_source_that_changes_meanwhile_is_seen_and_nothing_kept(
    tmp_path, source, monkeypatch, name
):
    disturb, file, said = DISTURBED[name]
    write = port_folder.write

    def disturbed(*arguments):
        write(*arguments)
        disturb(source)

    monkeypatch.setattr(port_folder, "write", disturbed)
    done = ported(source, tmp_path / "flax", "flax", status=1)
    assert f"{file}': expected no change since it was opened: " in done.stdout
    assert said in done.stdout
    assert "nothing kept" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("owner", [port_folder, carry_and_prove], ids=["to write", "to prove"])
def test_a_source_that_is_cut_meanwhile_ends_the_port(tmp_path, source, monkeypatch, owner):
    name = "write" if owner is port_folder else "prove"
    goes_on = getattr(owner, name)

    def after_a_cut(*arguments):
        os.truncate(source / "model.safetensors", 1000)
        return goes_on(*arguments)

    monkeypatch.setattr(owner, name, after_a_cut)
    done = ported(source, tmp_path / "flax", "flax", status=2)
    assert "is now 1000" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.slow
def test_a_damaged_orbax_checkpoint_is_named_with_its_arrays(tmp_path, source):
    ported(source, tmp_path / "flax", "flax", "--format", "orbax")
    # All files of numbers: which arrays share one is orbax's choice, and not always the same. The
    # index of names, which the state's own d/ holds, stays whole.
    for numbers in (tmp_path / "flax" / "state").glob("ocdbt.process_*/d/*"):
        os.truncate(numbers, 10)
    done = ported(tmp_path / "flax", tmp_path / "back", "torch", status=2)
    named = r"unreadable: '[\w.]+\.(kernel|scale|embedding)': orbax cannot read it"
    assert re.search(named, done.stderr), done.stderr
    assert not (tmp_path / "back").exists()
