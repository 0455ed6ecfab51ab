"""Tables at work on any NNX module: patterns, plans, loads, exports."""

import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.transfer.small_model import (
    LAYERS,
    MODEL,
    NARROW,
    WIDE,
    D,
    H,
    K,
    Model,
    bits,
    counting,
    model,
    problems_of,
    torch_tensors,
)
from jax_attn import transfer
from jax_attn.transfer import LINEAR


def test_one_pattern_serves_every_layer(loaded):
    tensors, arrays = torch_tensors(), transfer.flatten(loaded)
    for i in range(LAYERS):
        np.testing.assert_array_equal(
            arrays[f"layers.{i}.up.kernel"], tensors[f"h.{i}.mlp.up.weight"].T
        )
        np.testing.assert_array_equal(
            np.reshape(arrays[f"layers.{i}.attn.key.kernel"], (D, K * H)),
            tensors[f"h.{i}.self_attention.k_proj.weight"].T,
        )
        np.testing.assert_array_equal(arrays[f"layers.{i}.norm.scale"], tensors[f"h.{i}.ln.weight"])
    np.testing.assert_array_equal(arrays["tokens.embedding"], tensors["wte.weight"])


def test_export_is_the_inverse(loaded):
    tensors, exported = torch_tensors(), transfer.export(loaded, MODEL)
    assert exported.keys() == tensors.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(exported[key], tensor.numpy(), strict=True)


def test_gradients_take_the_same_table(loaded):
    gradients = nnx.grad(lambda m: m.layers[1].up(jnp.ones((1, D))).sum())(loaded)
    by_key = MODEL.to_torch(transfer.flatten(gradients))
    assert by_key["h.1.mlp.up.weight"].shape == (WIDE, D)
    assert by_key["h.1.mlp.up.weight"].all()
    assert not by_key["h.0.mlp.up.weight"].any()


SOURCES = {
    "torch": lambda tensor: tensor,
    "torch parameter": lambda tensor: torch.nn.Parameter(tensor),
    "torch, not contiguous": lambda tensor: tensor.T.contiguous().T if tensor.ndim == 2 else tensor,
    "NumPy": lambda tensor: tensor.numpy(),
    "NumPy, other byte order": lambda tensor: tensor.numpy().astype(">f4"),
    "NumPy, read only": lambda tensor: np.frombuffer(tensor.numpy().tobytes(), "f4").reshape(
        tensor.shape
    ),
    "JAX": lambda tensor: jnp.asarray(tensor.numpy()),
}


@pytest.mark.parametrize("convert", SOURCES.values(), ids=SOURCES)
def test_tensors_of_every_framework(convert, loaded):
    module = model()
    transfer.load(module, {k: convert(t) for k, t in torch_tensors().items()}, MODEL)
    assert bits(module) == bits(loaded)


DTYPES = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "float64", "int8")


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_numpy_keeps_every_bit(dtype):
    raw = np.random.default_rng(0).integers(0, 256, 64, dtype=np.uint8)
    tensor = torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(2, -1)
    array = transfer.as_numpy(tensor)
    assert array.dtype.name == dtype
    assert array.shape == tuple(tensor.shape)
    assert array.tobytes() == raw.tobytes()
    assert transfer.as_numpy(tensor[0, 0]).shape == ()


def test_bfloat16_is_the_same_number_everywhere():
    numbers = torch.tensor([1.0, -0.0, 3.140625, float("inf")], dtype=torch.bfloat16)
    array = transfer.as_numpy(numbers)
    assert array.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(array.astype(np.float32), numbers.float())
    np.testing.assert_array_equal(transfer.as_numpy(jnp.asarray(array)), array)


def test_exported_arrays_are_copies(loaded):
    exported = transfer.export(loaded, MODEL)
    before = bits(loaded)
    for array in exported.values():
        array += 1
    assert bits(loaded) == before


def test_load_returns_the_plan_it_carried_out():
    plan = transfer.load(model(), torch_tensors(), MODEL)
    assert plan.problems == []
    assert len(plan.moves) == len(torch_tensors())


def test_a_plan_prints_as_a_table_and_writes_nothing():
    module = Model(layers=1)
    before = bits(module)
    plan = transfer.plan(module, torch_tensors(layers=1), MODEL)
    assert bits(module) == before
    lines = str(plan).splitlines()
    assert lines[0].split() == ["torch", "shape", "flax", "shape", "dtype", "steps"]
    line = next(line for line in lines if "k_proj.weight" in line)
    assert re.split(r"\s{2,}", line) == [
        "h.0.self_attention.k_proj.weight",
        "[15, 30]",
        "layers.0.attn.key.kernel",
        "[30, 3, 5]",
        "float32",
        "linear heads",
    ]
    assert "h.{layer}.self_attention.k_proj.weight" in str(MODEL)


def test_a_plan_reads_no_values():
    class Shapes:
        """A tensor that can be described and nothing else."""

        def __init__(self, tensor):
            self.shape, self.dtype = tensor.shape, tensor.numpy().dtype

    class Lazy(dict):
        def describe(self, key):
            return transfer.arrays.describe(self[key])

    tensors = Lazy({key: Shapes(t) for key, t in torch_tensors().items()})
    assert transfer.plan(model(), tensors, MODEL).problems == []


class FailsOnSecondReading(Mapping):
    """A file that goes away between the plan and the load."""

    def __init__(self, tensors):
        self.tensors, self.read = tensors, set()

    def __getitem__(self, key):
        if key in self.read and key == "h.1.ln.weight":
            raise OSError("the disk is gone")
        self.read.add(key)
        return self.tensors[key]

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)


def test_all_or_nothing_when_reading_breaks_off(loaded):
    tensors = {key: tensor + 1 for key, tensor in torch_tensors().items()}
    before = bits(loaded)
    with pytest.raises(OSError, match="the disk is gone"):
        transfer.load(loaded, FailsOnSecondReading(tensors), MODEL)
    assert bits(loaded) == before


def test_float64_needs_x64_around_the_load():
    with jax.enable_x64(True):
        module = model(dtype=jnp.float64)
    tensors = torch_tensors(dtype=torch.float64)
    with jax.enable_x64(False):
        found, message = problems_of(lambda: transfer.load(module, tensors, MODEL))
    assert len(found) == len(tensors)
    assert {kind for kind, _ in found} == {"wrong dtype"}
    assert "enable x64" in message
    with jax.enable_x64(True):
        transfer.load(module, tensors, MODEL)
        assert transfer.flatten(module)["tokens.embedding"].dtype == jnp.float64


def test_metadata_and_other_variables_stay():
    module = Model(layers=1)
    module.tokens.embedding = nnx.Param(module.tokens.embedding.get_value(), note="mine")
    transfer.load(module, torch_tensors(layers=1), MODEL)
    assert module.tokens.embedding.note == "mine"
    assert not np.asarray(module.running.get_value()).any()


def test_an_uncommitted_array_stays_free_to_move():
    module = Model(layers=1)
    transfer.load(module, torch_tensors(layers=1), MODEL)
    assert not transfer.flatten(module)["tokens.embedding"].committed


@pytest.mark.parametrize("variables", [{"ref": True}, {"hijax": True}], ids=str)
def test_variables_of_every_kind(variables):
    with nnx.var_defaults(**variables):
        module = nnx.Linear(NARROW, WIDE, rngs=nnx.Rngs(0))
    weight, bias = counting([(WIDE, NARROW), (WIDE,)])
    transfer.load(module, {"weight": weight, "bias": bias}, LINEAR)
    np.testing.assert_array_equal(transfer.export(module, LINEAR)["weight"], weight)
    np.testing.assert_array_equal(module.kernel[...], weight.T)


def test_flatten_takes_modules_and_states(loaded):
    paths = transfer.flatten(loaded)
    assert list(paths) == list(transfer.flatten(nnx.state(loaded)))
    assert "running" not in paths
    assert "layers.2.attn.query.kernel" in paths
