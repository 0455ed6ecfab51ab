"""Checkpoint files: what is read, what is written, and what every bad file is told."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file as torch_load_file
from safetensors.torch import save_file as torch_save_file

from helpers.transfer.fresh_python import fresh_python
from jax_attn.transfer import TransferError, load_checkpoint, save_checkpoint
from jax_attn.transfer.files.prefixes import unwrapped

DTYPES = ("bool", "int8", "uint16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


def sample(dtype, shape=(3, 5)):
    return np.random.default_rng(0).integers(0, 2, shape).astype(np.dtype(dtype))


TENSORS = {"q_proj.weight": sample("float32"), "norm.weight": sample("bfloat16", (7,))}


def test_looking_for_a_name_reads_no_tensor():
    class Unread(dict):
        def __getitem__(self, key):
            raise AssertionError(f"{key} was read")

    view, _ = unwrapped(Unread({"module.q_proj.weight": None}))
    assert "q_proj.weight" in view
    assert "k_proj.weight" not in view


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 5)], ids=str)
def test_round_trip(tmp_path, dtype, shape):
    path, array = tmp_path / "model.safetensors", sample(dtype, shape)
    save_checkpoint(path, {"a": array})
    with load_checkpoint(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint["a"], array, strict=True)
        assert checkpoint.describe("a") == (shape, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_every_bit_crosses_to_torch_s_own_reader_and_back(tmp_path, dtype):
    raw = np.random.default_rng(0).integers(0, 256, 64, dtype=np.uint8)
    tensor = torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(2, -1)
    save_checkpoint(tmp_path / "ours.safetensors", {"a": tensor})
    theirs = torch_load_file(tmp_path / "ours.safetensors")["a"]
    assert theirs.dtype == tensor.dtype
    assert torch.equal(theirs.view(torch.uint8), tensor.view(torch.uint8))
    torch_save_file({"a": tensor}, tmp_path / "theirs.safetensors")
    with load_checkpoint(tmp_path / "theirs.safetensors") as checkpoint:
        assert checkpoint["a"].dtype.name == dtype
        assert checkpoint["a"].tobytes() == raw.tobytes()


SOURCES = {
    "torch": lambda a: torch.from_numpy(a),
    "torch parameter": lambda a: torch.nn.Parameter(torch.from_numpy(a)),
    "torch transposed": lambda a: torch.from_numpy(a.T.copy()).T,
    "JAX": jnp.asarray,
    "NumPy transposed": lambda a: a.T.copy().T,
    "NumPy strided": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "NumPy, other byte order": lambda a: a.astype(">f4"),
}


@pytest.mark.parametrize("convert", SOURCES.values(), ids=SOURCES)
def test_tensors_of_every_framework_and_stride(tmp_path, convert):
    array = np.arange(15, dtype=np.float32).reshape(3, 5)
    save_checkpoint(tmp_path / "model.safetensors", {"a": convert(array)})
    with load_checkpoint(tmp_path / "model.safetensors") as checkpoint:
        np.testing.assert_array_equal(checkpoint["a"], array, strict=True)


def test_a_checkpoint_is_a_lazy_mapping(tmp_path):
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, TENSORS)
    checkpoint = load_checkpoint(path)
    assert len(checkpoint) == 2
    assert set(checkpoint) == TENSORS.keys()
    assert "norm.weight" in checkpoint
    assert "norm.bias" not in checkpoint
    assert "2 tensors" in repr(checkpoint)
    with pytest.raises(KeyError):
        checkpoint["norm.bias"]
    read = checkpoint["norm.weight"]
    checkpoint.close()
    np.testing.assert_array_equal(read, TENSORS["norm.weight"])
    with pytest.raises(TransferError, match="closed"):
        checkpoint["norm.weight"]
    with pytest.raises(TransferError, match="closed"):
        checkpoint.describe("norm.weight")


def test_transformers_metadata_is_there(tmp_path):
    save_checkpoint(tmp_path / "model.safetensors", TENSORS)
    raw = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["__metadata__"] == {"format": "pt"}


def shards(folder, **files):
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")


def index(folder, weight_map, name="model.safetensors.index.json"):
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


A, C = sample("float32"), sample("bfloat16", (7,))


def test_a_folder_of_shards_is_one_mapping(tmp_path):
    shards(tmp_path, one={"a": A}, two={"c": C})
    with load_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint) == {"a", "c"}
        np.testing.assert_array_equal(checkpoint["c"], C)


def test_an_index_says_which_files_count(tmp_path):
    shards(tmp_path, one={"a": A}, two={"c": C}, old={"a": A + 1})
    index(tmp_path, {"a": "one.safetensors", "c": "two.safetensors"})
    with load_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint) == {"a", "c"}
        np.testing.assert_array_equal(checkpoint["a"], A)


INDEX = "model.safetensors.index.json"
OTHERS = {
    "weights of another layout": ({"consolidated": {"w": C}}, None, ("consolidated.safetensors",)),
    "shards": ({"one": {"a": A + 1}}, {"a": "one.safetensors"}, (INDEX, "one.safetensors")),
    "an index alone": ({}, {"a": "gone.safetensors"}, (INDEX,)),
    "a variant": ({"model.fp16": {"a": A + 1}}, None, ("model.fp16.safetensors",)),
}


@pytest.mark.parametrize(("files", "weight_map", "left_out"), OTHERS.values(), ids=OTHERS)
def test_a_single_file_of_the_usual_name_is_read_alone(tmp_path, files, weight_map, left_out):
    """As transformers does; what else lies there is named."""
    shards(tmp_path, model={"a": A}, **files)
    if weight_map:
        index(tmp_path, weight_map)
    with load_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint) == {"a"}
        np.testing.assert_array_equal(checkpoint["a"], A)
        assert checkpoint.left_out == left_out


def test_the_usual_index_is_read_beside_others(tmp_path):
    shards(tmp_path, one={"a": A}, two={"b": C}, consolidated={"a": A + 1})
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    index(tmp_path, {"a": "consolidated.safetensors"}, "consolidated.safetensors.index.json")
    with load_checkpoint(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint["a"], A)
        others = ("consolidated.safetensors", "consolidated.safetensors.index.json")
        assert checkpoint.left_out == others


BLOCKED = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(name + " is blocked", name=name)
sys.meta_path.insert(0, Absent())
"""
READ = """
from jax_attn import transfer
with transfer.load_checkpoint(sys.argv[1]) as checkpoint:
    for key in checkpoint:
        print(key, checkpoint[key].dtype, checkpoint[key].astype("float32").sum())
    transfer.LAYOUTS["gqa"].under("a", "b").renamed(transfer.FLAX_NAMES)
    transfer.save_checkpoint(sys.argv[1], dict(checkpoint))
"""


def test_files_and_tables_need_no_framework(tmp_path):
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, TENSORS)
    said = fresh_python(BLOCKED.format(blocked={"torch", "jax", "jaxlib", "flax"}) + READ, path)
    total = int(TENSORS["norm.weight"].astype(np.float32).sum())
    assert f"norm.weight bfloat16 {total}.0" in said


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_block_on_frameworks_blocks(framework):
    blocked = BLOCKED.format(blocked={"torch", "jax"})
    said = fresh_python(f"{blocked}import {framework}", status=1)
    assert f"{framework} is blocked" in said


LOAD = """
from flax import nnx
from jax_attn import transfer
module = nnx.Linear(5, 3, use_bias=False, rngs=nnx.Rngs(0))
with transfer.load_checkpoint(sys.argv[1]) as checkpoint:
    transfer.load(module, checkpoint, transfer.LINEAR)
    exported = transfer.export(module, transfer.LINEAR)
    assert exported["weight"].tobytes() == checkpoint["weight"].tobytes()
assert "torch" not in sys.modules
"""


@pytest.mark.slow
def test_a_checkpoint_is_loaded_where_torch_cannot_be_imported(tmp_path):
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, {"weight": A})
    fresh_python(BLOCKED.format(blocked={"torch"}) + LOAD, path)
