"""Checkpoints written: one tensor at a time, sharded, over what was there."""

import json
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertModel

from helpers.transfer.small_checkpoints import TENSORS, A, bits, model, names
from jax_attn.transfer import TransferError, load_checkpoint, save_checkpoint

INDEX = "model.safetensors.index.json"


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
    sizes = {"hidden_size": 6, "num_attention_heads": 2, "intermediate_size": 5, "vocab_size": 7}
    config = BertConfig(num_hidden_layers=1, max_position_embeddings=11, **sizes)
    written = BertModel(config)
    written.config.save_pretrained(tmp_path)
    save_checkpoint(model(tmp_path), written.state_dict(), shard_bytes=500)
    assert INDEX in names(tmp_path)
    read = BertModel.from_pretrained(tmp_path)
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
    with pytest.raises(TransferError, match=r"'k': expected float32\[0\], as described before"):
        save_checkpoint(model(tmp_path), lazy)
    assert names(tmp_path) == []


def test_saved_files_have_ordinary_permissions(tmp_path):
    save_checkpoint(model(tmp_path), {"a": A})
    (tmp_path / "other").touch()
    assert model(tmp_path).stat().st_mode == (tmp_path / "other").stat().st_mode


def test_an_open_checkpoint_survives_being_written_over(tmp_path):
    save_checkpoint(model(tmp_path), {"a": A, "b": A + 2})
    with load_checkpoint(tmp_path) as old:
        save_checkpoint(model(tmp_path), {"a": old["a"] + 1})
        np.testing.assert_array_equal(old["b"], A + 2)
    with load_checkpoint(tmp_path) as new:
        np.testing.assert_array_equal(new["a"], A + 1)
