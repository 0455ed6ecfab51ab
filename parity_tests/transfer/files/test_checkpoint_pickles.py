"""torch's own files: read through its weights-only reader alone, and nothing in them is run."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from helpers.transfer.fresh_python import fresh_python
from helpers.transfer.pickles import FORMS, STATE, saved
from jax_attn.cli import main
from jax_attn.cli.common.held import Held
from jax_attn.transfer import TransferError, as_numpy, load_checkpoint, save_checkpoint


@pytest.mark.parametrize("zipped", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_every_bit_is_read(tmp_path, suffix, zipped):
    with load_checkpoint(saved(tmp_path / f"m{suffix}", STATE, zipped)) as checkpoint:
        assert list(checkpoint) == list(STATE)
        for key, tensor in STATE.items():
            expected = as_numpy(tensor)
            assert checkpoint.describe(key) == (expected.shape, expected.dtype.name)
            assert checkpoint[key].tobytes() == expected.tobytes(), key
            assert checkpoint[key].flags.c_contiguous
        assert checkpoint.tied() == {"tied": "upper"}
        read = checkpoint["plain"]
    read += 1  # the reader's own
    with pytest.raises(TransferError, match="closed"):
        checkpoint["plain"]


HUGE = torch.ones(1).expand(2**20, 2**20)  # 4 TiB, of one stored number
COMMANDS = {
    "inspect": ("inspect",),
    "inspect --table": ("inspect", "--table", "table.py"),
    "port": ("port", "out", "--to", "flax", "--layout", "jax_attn.transfer.table.layouts:LINEAR"),
    "verify": ("verify", "--num-heads", "1"),
}


@pytest.mark.parametrize("zipped", FORMS.values(), ids=FORMS)
def test_a_tensor_of_more_bytes_than_its_file_is_not_read(tmp_path, zipped):
    path = saved(tmp_path / "m.bin", {"weight": torch.ones(2, 3), "huge": HUGE}, zipped)
    with load_checkpoint(path) as checkpoint:
        assert checkpoint["weight"].shape == (2, 3)
        assert checkpoint.tied() == {}
        for read in (checkpoint.describe, checkpoint.mapped, checkpoint.__getitem__):
            with pytest.raises(TransferError, match=r"'huge': expected no more than the .* bytes"):
                read("huge")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_names_such_a_tensor_without_reading_it(name, tmp_path, monkeypatch):
    saved(tmp_path / "m.bin", {"weight": torch.ones(2, 3), "huge": HUGE})
    monkeypatch.chdir(tmp_path)
    command, *others = COMMANDS[name]
    done = CliRunner().invoke(main, [command, "m.bin", *others])
    output = " ".join(done.output.split())
    assert "'huge': expected no more than" in output
    assert "float32[1048576, 1048576] of 4,398,046,511,104 bytes" in output
    assert (done.exit_code == 0) == (name == "inspect")
    assert {path.name for path in tmp_path.iterdir()} == {"m.bin"}


def test_a_zip_is_mapped_and_its_bytes_are_not_changed(tmp_path):
    path = saved(tmp_path / "m.bin", STATE)
    before = path.read_bytes()
    with load_checkpoint(path) as checkpoint:
        with pytest.raises(ValueError, match="read-only"):
            checkpoint.mapped("plain")[0] = 1
        assert str(path) in Path("/proc/self/maps").read_text()
    assert path.read_bytes() == before


def test_a_pickle_becomes_safetensors(tmp_path):
    with load_checkpoint(saved(tmp_path / "m.bin", STATE)) as checkpoint:
        save_checkpoint(tmp_path / "m.safetensors", checkpoint)
    with load_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        assert {k: a.tobytes() for k, a in checkpoint.items()} == {
            k: as_numpy(t).tobytes() for k, t in STATE.items()
        }
        assert checkpoint.tied() == {"tied": "upper"}


def test_shards_and_their_index(tmp_path):
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        '{"weight_map": {"a": "m-00001-of-00002.bin", "b": "m-00002-of-00002.bin"}}'
    )
    saved(tmp_path / "m-00001-of-00002.bin", {"a": torch.ones(2)})
    saved(tmp_path / "m-00002-of-00002.bin", {"b": torch.zeros(3)}, zipped=False)
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with load_checkpoint(path) as checkpoint:
            assert {key: a.tolist() for key, a in checkpoint.items()} == {"a": [1, 1], "b": [0] * 3}


FOLDERS = {  # files -> which is read
    "one": (["m.pt"], "m.pt"),
    "the usual name among others": (["pytorch_model.bin", "training_args.bin"], "pytorch_model"),
    "safetensors first": (["pytorch_model.bin", "model.safetensors"], "model.safetensors"),
}


@pytest.mark.parametrize(("files", "read"), FOLDERS.values(), ids=FOLDERS)
def test_which_file_of_a_folder_is_read(tmp_path, files, read):
    for name in files:
        if name.endswith(".safetensors"):
            save_checkpoint(tmp_path / name, {name: torch.ones(2)})
        else:
            saved(tmp_path / name, {name: torch.ones(2)})
    with load_checkpoint(tmp_path) as checkpoint:
        assert next(iter(checkpoint)).startswith(read)


def test_several_pickles_and_none_of_the_usual_name(tmp_path):
    for name in ("a.bin", "b.pt"):
        saved(tmp_path / name, {})
    with pytest.raises(TransferError, match=r"expected one checkpoint .*\['a.bin', 'b.pt'\]"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("part", ["state_dict", "model"])
@pytest.mark.parametrize("zipped", FORMS.values(), ids=FORMS)
def test_a_part_is_asked_for_by_name(tmp_path, part, zipped):
    path = saved(tmp_path / "m.pt", {part: STATE, "epoch": 3, "lr": [0.1]}, zipped)
    with pytest.raises(TransferError) as error:
        load_checkpoint(path)
    (problem,) = error.value.problems
    assert problem.text == (
        f"expected names and tensors, got ['{part}', 'epoch', 'lr']; tensors are under ['{part}']"
    )
    assert problem.hint == f"jax-attn inspect and port take --part {part}; in Python, part={part!r}"
    with load_checkpoint(path, part=part) as checkpoint:
        assert list(checkpoint) == list(STATE)


ONE, TWO, MANY = (
    {name: torch.ones(2) for name in names} for names in (("w",), ("a.w", "b"), ("x", "y", "z"))
)
TOLD = {  # what is in the file, the parts that the refusal names
    "a key with a dot": ({"a.b": ONE}, ["a.b"]),
    "and within a key": ({"x": {"a.b": ONE, "a": {"c": ONE}}}, ["x.a.b", "x.a.c"]),
    "two keys with dots": ({"x.y": {"a.b": ONE}}, ["x.y.a.b"]),
    "a key that begins another": ({"a": {"lr": 1}, "a.b": {"c": ONE}}, ["a.b.c"]),
    "three keys": ({"a": {"b": {"c": ONE}}}, ["a.b.c"]),
    "four keys": ({"a": {"b": {"c": {"d": ONE}}}}, []),
    "a trainer's tensor in the file": (ONE | {"model": MANY}, ["model", ""]),
    "a trainer's tensor within a key": ({"state": ONE | {"model": MANY}}, ["state.model"]),
}


@pytest.mark.parametrize("name", TOLD)
def test_every_part_that_a_refusal_names_is_read(tmp_path, name):
    held, parts = TOLD[name]
    path = saved(tmp_path / "m.pt", held)
    with pytest.raises(TransferError) as error:
        load_checkpoint(path)
    (problem,) = error.value.problems
    assert re.findall(r"part=\'([^']*)\'", problem.hint) == parts
    assert [shlex.split(x) for x in re.findall(r"--part (\S+?)[; ]", problem.hint)] == [
        [part] for part in parts
    ]
    for part in parts:
        with load_checkpoint(path, part=part) as checkpoint:
            assert any(isinstance(checkpoint.get(key), np.ndarray) for key in ("w", "x"))


FLAT = {
    "an average of more tensors": (TWO | {"ema": MANY}, None),
    "a part's": ({"model": TWO | {"ema": MANY}}, "model"),
    "the file's by name": (ONE | {"ema": MANY}, ""),
    "a part's by name": ({"model": ONE | {"ema": MANY}}, "model"),
}


@pytest.mark.parametrize("name", FLAT)
def test_a_module_is_read_beside_a_mapping_of_more_tensors(tmp_path, name):
    held, part = FLAT[name]
    with load_checkpoint(saved(tmp_path / "m.pt", held), part=part) as checkpoint:
        assert list(checkpoint) == list(held["model"] if part else held)


@pytest.mark.parametrize("part", [None, "", "model"])
def test_a_printed_command_and_call_have_the_part_that_was_given(part):
    held = Held(part, "")
    assert shlex.split(held.options) == ([] if part is None else ["--part", part])
    assert held.arguments == ("" if part is None else f", part={part!r}")


def test_weights_only_is_all_that_is_ever_asked(tmp_path, monkeypatch):
    asked = []

    def load(*args, **options):
        asked.append(options)
        raise RuntimeError("Re-running with weights_only=False will likely succeed.")

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(TransferError):
        load_checkpoint(saved(tmp_path / "m.bin", STATE))
    assert asked == [{"map_location": "cpu", "weights_only": True, "mmap": True}]


@pytest.mark.parametrize(
    ("version", "read"),
    {"1.13.1": False, "2.6.0+cu124": False, "2.9.1": False, "2.10.0": True, "3.0": True}.items(),
)
def test_torch_is_new_enough(tmp_path, monkeypatch, version, read):
    path = saved(tmp_path / "m.bin", STATE)
    monkeypatch.setattr(torch, "__version__", version)
    if read:
        assert len(load_checkpoint(path)) == len(STATE)
        return
    with pytest.raises(TransferError) as error:
        load_checkpoint(path)
    assert version in str(error.value)
    assert "pip install --upgrade 'torch>=2.10'" in str(error.value)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from jax_attn.transfer import TransferError, load_checkpoint
try:
    load_checkpoint(sys.argv[1])
except TransferError as error:
    print(error)
"""


def test_where_torch_is_missing_the_line_that_installs_it_is_told(tmp_path):
    path = saved(tmp_path / "m.bin", STATE)
    said = fresh_python(WITHOUT_TORCH, path)
    assert "torch is not installed" in said
    assert "pip install --upgrade 'torch>=2.10'" in said
