"""The tables: every design's torch weights come back from Flax whole, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from helpers.transfer.layout_cases import CASES, abstract, table
from jax_attn import transfer
from jax_attn.transfer import LAYOUTS


def test_a_real_module_is_loaded_as_an_abstract_one_is():
    port = CASES["gqa"]
    made, shape_only = port.flax(jnp.float32), abstract(port.flax)
    tensors = port.torch().state_dict()
    transfer.load(made, tensors, LAYOUTS["gqa"])
    transfer.load(shape_only, tensors, LAYOUTS["gqa"])
    for path, array in transfer.flatten(made).items():
        np.testing.assert_array_equal(array, transfer.flatten(shape_only)[path])


DTYPES = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16, "float64": np.uint64}


def any_bits(shape, dtype, rng):
    """Every kind of number: NaNs with payloads, infinities, subnormals, both zeros."""
    bits = np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype)
    special = np.array([1 << (8 * bits.itemsize - 1), 0], dtype)  # -0.0 and 0.0
    made = bits.copy()
    made[:2] = special
    return made.reshape(shape)


def torch_bits(bits, dtype):
    signed = bits.view(f"int{8 * bits.itemsize}")
    return torch.from_numpy(signed).view(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("port", CASES.values(), ids=CASES)
def test_round_trip_keeps_every_bit(port, dtype):
    rng = np.random.default_rng(2)
    sources = {
        key: any_bits(tuple(tensor.shape), DTYPES[dtype], rng)
        for key, tensor in port.torch().state_dict().items()
    }
    tensors = {key: torch_bits(bits, dtype) for key, bits in sources.items()}
    with jax.enable_x64(dtype == "float64"):
        module = abstract(port.flax, jnp.dtype(dtype))
        transfer.load(module, tensors, table(port))
        exported = transfer.export(module, table(port))
    assert exported.keys() == sources.keys()
    for key, bits in sources.items():
        assert exported[key].dtype.name == dtype
        assert exported[key].tobytes() == bits.tobytes(), key
