"""Checkpoints that cannot be written, or not to the end: the reason said, and nothing left."""

import os
import signal

import ml_dtypes
import numpy as np
import pytest
import torch

from helpers.transfer.fresh_python import fresh_python
from helpers.transfer.small_checkpoints import TENSORS, A, model, names
from jax_attn.transfer import TransferError, load_checkpoint, save_checkpoint

UNSTORABLE = {
    "objects": (np.array([None]), "expected numbers, got dtype object"),
    "text": (np.array(["a"]), "expected numbers"),
    "complex": (np.ones(2, np.complex64), "got complex64"),
    "float8": (np.ones(2, ml_dtypes.float8_e5m2), "got float8_e5m2"),
    "four bits": (np.ones(2, ml_dtypes.int4), "got int4"),
    "a list": ([1.0], "got list"),
    "a number": (1.0, "got float"),
    "meta": (torch.ones(2, device="meta"), "meta device"),
    "sparse": (torch.eye(2).to_sparse(), "sparse"),
}


@pytest.mark.parametrize(("tensor", "reason"), UNSTORABLE.values(), ids=UNSTORABLE)
def test_what_cannot_be_stored_is_named_and_no_file_appears(tmp_path, tensor, reason):
    tensors = {"good": A, "bad": tensor, 7: A, "__metadata__": A, "\ud800": A}
    with pytest.raises(TransferError) as error:
        save_checkpoint(model(tmp_path), tensors)
    assert {p.name for p in error.value.problems} == {"bad", "7", "__metadata__", "\ud800"}
    assert reason in str(error.value)
    assert names(tmp_path) == []


NO_TENSORS = {
    "a module": (torch.nn.Linear(2, 3), r"got Linear: pass its state_dict\(\)"),
    "pairs": ([("a", A)], "got list"),
}


@pytest.mark.parametrize("name", NO_TENSORS)
def test_what_is_no_mapping_is_told(name, tmp_path):
    tensors, says = NO_TENSORS[name]
    with pytest.raises(TypeError, match=f"tensors: expected a mapping of names to tensors, {says}"):
        save_checkpoint(model(tmp_path), tensors)


def test_what_cannot_be_opened_is_named():
    with pytest.raises(TypeError, match="part: expected a string or None, got 3"):
        load_checkpoint("a.pt", part=3)
    with pytest.raises(ValueError, match="path: expected a file or a folder, got an empty name"):
        load_checkpoint("")


FORMS = {"one file": None, "shards": 30}
FAILURES = {"disk full": OSError("no space left"), "interrupted": KeyboardInterrupt()}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("shard_bytes", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("flushed", [0, 1, 2])
def test_a_failed_save_leaves_the_old_files(tmp_path, monkeypatch, shard_bytes, flushed, failure):
    save_checkpoint(model(tmp_path), TENSORS, shard_bytes=shard_bytes)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    flush, left = os.fsync, [None] * flushed if shard_bytes else []

    def fails(descriptor):
        if not left:
            raise failure
        left.pop()
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(TransferError if isinstance(failure, OSError) else KeyboardInterrupt):
        save_checkpoint(model(tmp_path), {"a": A + 1, "d": A}, shard_bytes=shard_bytes and 60)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after == before


KILLED = """
import os, signal, sys
import numpy as np
from jax_attn.transfer import save_checkpoint
replace, left = os.replace, int(sys.argv[2])
def dies(*args):
    global left
    if not left: os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    replace(*args)
os.replace = dies
import pathlib
pathlib.Path.replace = lambda self, to: dies(self, to)
tensors = {f"k{i}": np.full(7, i, np.float32) for i in range(3)}
save_checkpoint(sys.argv[1], tensors, shard_bytes=28)
"""


@pytest.mark.parametrize("renamed", [0, 1, 3, 4])
def test_a_killed_save_leaves_no_folder_that_looks_whole(tmp_path, renamed):
    """Over an older checkpoint of as many files, where a mixture would be hard to see."""
    old = {f"k{i}": np.full(7, -1, np.float32) for i in range(3)}
    save_checkpoint(model(tmp_path), old, shard_bytes=28)
    fresh_python(KILLED, model(tmp_path), renamed, status=-signal.SIGKILL if renamed < 4 else 0)
    if renamed == 4:  # all is in place
        with load_checkpoint(tmp_path) as checkpoint:
            assert [checkpoint[key][0] for key in sorted(checkpoint)] == [0, 1, 2]
        return
    with pytest.raises(TransferError, match="expected an index"):
        load_checkpoint(tmp_path)


FULL = """
import resource, sys
import numpy as np
from jax_attn.transfer import TransferError, save_checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
save_checkpoint(sys.argv[1], {"small": np.ones(9)})
try:
    save_checkpoint(sys.argv[2], {"a": np.ones(9), "b": np.ones(20_000)}, shard_bytes=1000)
except TransferError as error:
    print(error)
"""


def test_a_disk_that_is_full_is_said_and_nothing_is_left(tmp_path):
    said = fresh_python(FULL, model(tmp_path), tmp_path / "big.safetensors")
    assert "cannot be written" in said
    assert "big.safetensors" in said
    assert names(tmp_path) == ["model.safetensors"]


BAD_TARGETS = {
    "another extension": ("model.bin", "ends in .safetensors"),
    "a folder": ("", "ends in .safetensors"),
    "no such folder": ("nowhere/model.safetensors", "cannot be written"),
    "under a file": ("file/model.safetensors", "cannot be written"),
    "where nobody may write": ("/proc/model.safetensors", "cannot be written"),
}


@pytest.mark.parametrize(("name", "reason"), BAD_TARGETS.values(), ids=BAD_TARGETS)
@pytest.mark.parametrize("shard_bytes", FORMS.values(), ids=FORMS)
def test_a_bad_target_is_named(tmp_path, name, reason, shard_bytes):
    (tmp_path / "file").touch()
    with pytest.raises(TransferError, match=reason) as error:
        save_checkpoint(tmp_path / name, TENSORS, shard_bytes=shard_bytes)
    assert str(tmp_path / name) in str(error.value)
    assert names(tmp_path) == ["file"]
