"""torch's own files: read through its weights-only reader alone, and nothing in them is run."""

import pickle
import re
import shlex
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from helpers.transfer.fresh_python import fresh_python
from jax_attn.cli import main
from jax_attn.cli.common.held import Held
from jax_attn.transfer import TransferError, as_numpy, load_checkpoint, save_checkpoint

torch.manual_seed(0)
PACKED = torch.randn(6, 5)
STATE = OrderedDict(
    {
        "plain": torch.randn(3, 5),
        "bf16": torch.randn(7).to(torch.bfloat16),
        "f16": torch.randn(2, 3).half(),
        "f64": torch.randn(2).double(),
        "ids": torch.arange(4),
        "scalar": torch.tensor(3.0),
        "none": torch.zeros(0, 5),
        "transposed": torch.randn(5, 3).T,
        "upper": PACKED[:3],
        "lower": PACKED[3:, ::2],
        "tied": PACKED[:3],
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "expanded": torch.randn(1, 3).expand(2, 3),
    }
)
FORMS = {"zip": True, "legacy": False}


def saved(path, what, zipped=True):
    torch.save(what, path, _use_new_zipfile_serialization=zipped)
    return path


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


class Runs:
    """Pickled, it would make a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def written(content):
    return lambda path: path.write_bytes(content)


def of(what, zipped=True):
    return lambda path: saved(path, what, zipped)


def cut(what, zipped=True):
    def write(path):
        saved(path, what, zipped)
        path.write_bytes(path.read_bytes()[:-200])

    return write


SPLIT = {"a": STATE, "b": STATE, "c": {}}
BAD = {  # what is in the file, the part asked for, what is said
    "empty": (written(b""), None, "(0 bytes) as weights only: EOFError"),
    "garbage": (written(b"nonsense" * 50), None, "Unsupported operand 110"),
    "one byte": (written(b"x"), None, "(1 bytes) as weights only"),
    "a zip cut": (cut(STATE), None, "PytorchStreamReader failed reading zip archive"),
    "a legacy file cut": (cut(STATE, False), None, "as weights only"),
    "an empty zip": (written(b"PK\x05\x06" + b"\0" * 18), None, "as weights only"),
    "safetensors": (
        lambda path: (
            save_checkpoint(path.with_suffix(".safetensors"), STATE)
            or path.with_suffix(".safetensors").rename(path)
        ),
        None,
        "as weights only",
    ),
    "a whole module": (of(torch.nn.Linear(2, 2)), None, "torch.nn.modules.linear.Linear"),
    "a script": (
        lambda path: torch.jit.save(torch.jit.script(torch.nn.Identity()), str(path)),
        None,
        "TorchScript",
    ),
    "a tensor": (of(torch.ones(2)), None, "expected a mapping of names to tensors, got Tensor"),
    "numbers for names": (of({0: torch.ones(2)}), None, "expected strings as names of tensors"),
    "a list": (of([torch.ones(2)]), None, "expected a mapping of names to tensors, got list"),
    "no tensor at all": (of({"epoch": 3}), None, "expected names and tensors, got ['epoch']"),
    "two parts": (of(SPLIT), None, "take --part a or --part b; in Python, part='a' or part='b'"),
    "no such part": (of({"state_dict": STATE}), "state_dit", "nearest: state_dict"),
    "no such part of a part": (
        of({"a": {"b": STATE}}),
        "a.c",
        "part: expected one of its keys, got 'a.c'; they are ['a'] nearest: a.b",
    ),
    "a part of no mapping": (of([1]), "state_dict", "part: expected one of its keys"),
    "a part without tensors": (of({"model": {"epoch": 3}}), "model", "got ['epoch']"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # scripts
@pytest.mark.parametrize(("write", "part", "reason"), BAD.values(), ids=BAD)
def test_a_bad_pickle_is_named_with_its_reason(tmp_path, write, part, reason):
    path = tmp_path / "m.pt"
    write(path)
    with pytest.raises(TransferError) as error:
        load_checkpoint(path, part=part)
    (problem,) = error.value.problems
    assert (problem.kind, problem.name) == ("file", str(path))
    assert reason in f"{problem.text} {problem.hint}"


PAYLOADS = {
    "zip": lambda what, path: saved(path, what),
    "legacy": lambda what, path: saved(path, what, zipped=False),
    "a bare pickle": lambda what, path: path.write_bytes(pickle.dumps(what, protocol=2)),
}


@pytest.mark.parametrize("write", PAYLOADS.values(), ids=PAYLOADS)
def test_a_malicious_pickle_is_refused_and_nothing_in_it_runs(tmp_path, write):
    path, trace = tmp_path / "m.bin", tmp_path / "it ran"
    write({"a": torch.ones(2).tolist(), "b": Runs(trace)}, path)
    with pytest.raises(TransferError) as error:
        load_checkpoint(path)
    assert "open" in str(error.value)
    for advice in ("weights_only", "trust", "add_safe_globals"):
        assert advice not in str(error.value)
    assert not trace.exists()


def test_the_payload_would_have_run(tmp_path):
    trace = tmp_path / "it ran"
    pickle.loads(pickle.dumps(Runs(trace))).close()
    assert trace.exists()


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


ODD = {
    "meta": (lambda: torch.ones(2, device="meta"), "meta device"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "call .to_dense() first"),
    "compressed": (lambda: torch.eye(3).to_sparse_csr(), "call .to_dense() first"),
    "a number": (lambda: 3, "got int"),
    "text": (lambda: "relu", "got str"),
    "a mapping": (lambda: {"b": torch.ones(2)}, "got dict"),
    "nothing": (lambda: None, "got NoneType"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's sparse tensors are in beta
@pytest.mark.parametrize(("make", "reason"), ODD.values(), ids=ODD)
def test_what_is_no_array_among_tensors_is_named_when_it_is_read(tmp_path, make, reason):
    with load_checkpoint(saved(tmp_path / "m.bin", {"good": PACKED, "odd": make()})) as checkpoint:
        np.testing.assert_array_equal(checkpoint["good"], PACKED)
        for look in (checkpoint.describe, checkpoint.mapped, checkpoint.__getitem__):
            with pytest.raises(TransferError) as error:
                look("odd")
            (problem,) = error.value.problems
            assert (problem.kind, problem.name) == ("unreadable", "odd")
            assert reason in problem.text
        assert checkpoint.tied() == {}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("zipped", FORMS.values(), ids=FORMS)
def test_a_quantised_tensor_is_named_when_it_is_read(tmp_path, zipped):
    odd = torch.quantize_per_tensor(torch.ones(2, 3), scale=0.1, zero_point=0, dtype=torch.qint8)
    path = saved(tmp_path / "m.bin", {"good": PACKED, "odd": odd}, zipped)
    with load_checkpoint(path) as checkpoint:
        with pytest.raises(TransferError, match="dequantize"):
            checkpoint["odd"]
        with pytest.raises(TransferError, match="dequantize"):
            save_checkpoint(tmp_path / "m.safetensors", checkpoint)
    assert not (tmp_path / "m.safetensors").exists()
