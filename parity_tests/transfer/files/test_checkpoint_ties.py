"""Tied tensors in checkpoints: written once, read tied, and only what is one memory."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, load_model, save_model

from helpers.transfer.small_checkpoints import A, bits, drawn, model
from jax_attn.transfer import load_checkpoint, save_checkpoint

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
