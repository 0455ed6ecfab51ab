"""Checkpoints written: one tensor at a time, sharded, and whole or not at all."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, load_model, save_model

from jax_attn.transfer import TransferError, load_checkpoint, save_checkpoint

INDEX = "model.safetensors.index.json"


def drawn(seed, *shape, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


A = drawn(0, 3, 5)
# 60, 28, 26, 0 and 8 bytes
TENSORS = {
    "a": A,
    "b": drawn(1, 7),
    "c": drawn(2, 13, dtype="bfloat16"),
    "none": drawn(3, 0, 5),
    "one": drawn(4, dtype="float64"),
}


def bits(tensors):
    return {key: (a.dtype.name, a.shape, a.tobytes()) for key, a in tensors.items()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def model(folder):
    return folder / "model.safetensors"


def shards(count):
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


SHARDINGS = {  # shard_bytes -> the keys of each file
    "None": (None, [[*"abc", "none", "one"]]),
    "more than all": (1000, [[*"abc", "none", "one"]]),
    "exactly all": (122, [[*"abc", "none", "one"]]),
    "one byte less": (121, [[*"abc", "none"], ["one"]]),
    "two files": (88, [[*"ab"], ["c", "none", "one"]]),
    "one each": (27, [["a"], ["b"], ["c", "none"], ["one"]]),
    "less than any": (1, [["a"], ["b"], ["c"], ["none"], ["one"]]),
}


@pytest.mark.parametrize(("shard_bytes", "groups"), SHARDINGS.values(), ids=SHARDINGS)
def test_files_hold_at_most_so_many_bytes_and_the_index_says_where(tmp_path, shard_bytes, groups):
    save_checkpoint(model(tmp_path), TENSORS, shard_bytes=shard_bytes)
    files = ["model.safetensors"] if len(groups) == 1 else shards(len(groups))
    assert names(tmp_path) == sorted(files + [INDEX] * (len(groups) > 1))
    for file, keys in zip(files, groups, strict=True):
        assert sorted(load_file(tmp_path / file)) == sorted(keys)
    for path in (tmp_path, model(tmp_path)):
        with load_checkpoint(path) as checkpoint:
            assert bits(checkpoint) == bits(TENSORS)
    if len(groups) > 1:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"] == {"total_size": sum(a.nbytes for a in TENSORS.values())}
        assert index["weight_map"] == {
            key: file for file, keys in zip(files, groups, strict=True) for key in keys
        }


def test_transformers_reads_the_shards(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 6, "num_attention_heads": 2, "intermediate_size": 5, "vocab_size": 7}
    config = transformers.BertConfig(num_hidden_layers=1, max_position_embeddings=11, **sizes)
    written = transformers.BertModel(config)
    written.config.save_pretrained(tmp_path)
    save_checkpoint(model(tmp_path), written.state_dict(), shard_bytes=500)
    assert INDEX in names(tmp_path)
    read = transformers.BertModel.from_pretrained(tmp_path)
    for key, tensor in written.state_dict().items():
        assert torch.equal(read.state_dict()[key], tensor), key


@pytest.mark.parametrize("shard_bytes", [0, -1, True, 1.5, "5GB"])
def test_shard_bytes_is_a_count(tmp_path, shard_bytes):
    with pytest.raises(ValueError, match="shard_bytes: expected an int ≥ 1 or None, got"):
        save_checkpoint(model(tmp_path), TENSORS, shard_bytes=shard_bytes)
    assert names(tmp_path) == []


OLDER_AND_NEWER = {
    "one by many": (None, 60),
    "many by one": (60, None),
    "many by fewer": (30, 60),
    "many by as many others": (60, 60),
}


@pytest.mark.parametrize(("older", "newer"), OLDER_AND_NEWER.values(), ids=OLDER_AND_NEWER)
def test_what_was_there_before_is_replaced(tmp_path, older, newer):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "other-00001-of-00002.safetensors").write_text("")
    save_checkpoint(model(tmp_path), TENSORS, shard_bytes=older)
    with load_checkpoint(model(tmp_path)) as old:
        changed = {key: old[key] + 1 for key in old}
        save_checkpoint(model(tmp_path), changed, shard_bytes=newer)
        assert bits(old) == bits(TENSORS)
    with load_checkpoint(model(tmp_path)) as new:
        assert bits(new) == bits(changed)
    kept = ["config.json", "other-00001-of-00002.safetensors"]
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    save_checkpoint(model(fresh), changed, shard_bytes=newer)
    assert names(tmp_path) == sorted([*kept, "fresh", *names(fresh)])


class Lazy(Mapping):
    """Makes each array when it is asked for, and knows how many are alive."""

    def __init__(self, keys, at=lambda key: None, shape=(3, 5)):
        self.keys_, self.at, self.shape = keys, at, shape
        self.alive = self.most = 0

    def __getitem__(self, key):
        self.at(key)
        self.alive += 1
        self.most = max(self.most, self.alive)
        return Counted(self, self.keys_.index(key))

    def __iter__(self):
        return iter(self.keys_)

    def __len__(self):
        return len(self.keys_)


class Counted(np.ndarray):
    def __new__(cls, owner, value):
        made = np.full(owner.shape, value, np.float32).view(cls)
        made.owner = owner
        return made

    def __array_finalize__(self, other):
        self.owner = None

    def __del__(self):
        if self.owner is not None:
            self.owner.alive -= 1


def test_a_lazy_mapping_is_asked_for_one_at_a_time(tmp_path):
    lazy = Lazy([f"k{i}" for i in range(11)])
    save_checkpoint(model(tmp_path), lazy, shard_bytes=100)
    # two, for as long as it takes to see that they are not the same
    assert lazy.most <= 2
    assert lazy.alive == 0
    with load_checkpoint(tmp_path) as checkpoint:
        assert {key: array.mean() for key, array in checkpoint.items()} == {
            f"k{i}": i for i in range(11)
        }


def test_a_tensor_that_changes_between_two_looks_is_an_error(tmp_path):
    seen = []
    lazy = Lazy(["k"], at=seen.append)
    lazy.at = lambda key: setattr(lazy, "shape", (len(seen),)) or seen.append(key)
    with pytest.raises(TransferError, match=r"'k': expected float32\[0\], as it was at first"):
        save_checkpoint(model(tmp_path), lazy)
    assert names(tmp_path) == []


SHARED = torch.from_numpy(A)
TIED = {
    "one torch tensor": lambda: (SHARED, SHARED),
    "torch views of one memory": lambda: (SHARED[:], torch.nn.Parameter(SHARED)),
    "one NumPy array": lambda: (A, A[:]),
    "one JAX array": lambda: [jnp.asarray(A)] * 2,
}


@pytest.mark.parametrize("make", TIED.values(), ids=TIED)
@pytest.mark.parametrize("shard_bytes", [None, 50])
def test_tied_tensors_are_written_once_and_read_tied(tmp_path, make, shard_bytes):
    one, two = make()
    save_checkpoint(
        model(tmp_path), {"a": one, "b": drawn(1, 7), "c": two}, shard_bytes=shard_bytes
    )
    stored = [key for p in tmp_path.glob("*.safetensors") for key in load_file(p)]
    assert sorted(stored) == ["a", "b"]
    with load_checkpoint(tmp_path) as checkpoint:
        assert sorted(checkpoint) == ["a", "b", "c"]
        assert checkpoint.tied() == {"c": "a"}
        np.testing.assert_array_equal(checkpoint["c"], A, strict=True)
        save_checkpoint(tmp_path / "again.safetensors", checkpoint)
    with load_checkpoint(tmp_path / "again.safetensors") as again:
        assert again.tied() == {"c": "a"}


NOT_TIED = {
    "equal values": lambda: (A, A.copy()),
    "two halves": lambda: (SHARED[:, :2], SHARED[:, 2:4]),
    "a part": lambda: (A, A[:2]),
    "transposed": lambda: (A[:3, :3], A[:3, :3].T),
    "read as another dtype": lambda: (A, A.view(np.int32)),
    "nothing": lambda: (A[:0], A[:0]),
}


@pytest.mark.parametrize("make", NOT_TIED.values(), ids=NOT_TIED)
def test_tensors_that_are_not_the_same_memory_are_not_tied(tmp_path, make):
    one, two = make()
    save_checkpoint(model(tmp_path), {"one": one, "two": two})
    assert sorted(load_file(model(tmp_path))) == ["one", "two"]
    with load_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tied() == {}
        np.testing.assert_array_equal(checkpoint["two"], np.asarray(two), strict=True)


class TiedModel(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(7, 5)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight


def test_ties_are_those_of_safetensors_own_save_model_and_load_model(tmp_path):
    ours, theirs, empty = TiedModel(0), tmp_path / "theirs.safetensors", TiedModel(1)
    save_model(ours, theirs)
    with load_checkpoint(theirs) as checkpoint:
        assert bits(checkpoint) == bits({k: t.numpy() for k, t in ours.state_dict().items()})
    save_checkpoint(model(tmp_path), ours.state_dict())
    assert load_model(empty, model(tmp_path)) == (set(), [])
    assert torch.equal(empty.head.weight, ours.embed.weight)


def test_what_is_no_tie_in_the_metadata_is_left_alone(tmp_path):
    save_checkpoint(model(tmp_path), {"pt": A, "other": A})
    with load_checkpoint(tmp_path) as checkpoint:
        assert sorted(checkpoint) == ["other", "pt"]


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


def python(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("renamed", [0, 1, 3, 4])
def test_a_killed_save_leaves_no_folder_that_looks_whole(tmp_path, renamed):
    """Over an older checkpoint of as many files, where a mixture would be hard to see."""
    old = {f"k{i}": np.full(7, -1, np.float32) for i in range(3)}
    save_checkpoint(model(tmp_path), old, shard_bytes=28)
    done = python(KILLED, model(tmp_path), renamed)
    if renamed == 4:  # all is in place
        assert done.returncode == 0, done.stderr
        with load_checkpoint(tmp_path) as checkpoint:
            assert [checkpoint[key][0] for key in sorted(checkpoint)] == [0, 1, 2]
        return
    assert done.returncode == -signal.SIGKILL, done.stderr
    with pytest.raises(TransferError, match="expected the index"):
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
    done = python(FULL, model(tmp_path), tmp_path / "big.safetensors")
    assert done.returncode == 0, done.stderr
    assert "cannot be written" in done.stdout
    assert "big.safetensors" in done.stdout
    assert names(tmp_path) == ["model.safetensors"]


def test_saved_files_have_ordinary_permissions(tmp_path):
    save_checkpoint(model(tmp_path), {"a": A})
    (tmp_path / "other").touch()
    assert model(tmp_path).stat().st_mode == (tmp_path / "other").stat().st_mode


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


def test_an_open_checkpoint_survives_being_written_over(tmp_path):
    save_checkpoint(model(tmp_path), {"a": A, "b": A + 2})
    with load_checkpoint(tmp_path) as old:
        save_checkpoint(model(tmp_path), {"a": old["a"] + 1})
        np.testing.assert_array_equal(old["b"], A + 2)
    with load_checkpoint(tmp_path) as new:
        np.testing.assert_array_equal(new["a"], A + 1)
