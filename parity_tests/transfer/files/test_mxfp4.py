"""MXFP4 stacks read as bfloat16, against transformers' own dequantization."""

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from jax_attn.transfer.arrays import LazyMapping, Spec, as_numpy, describe
from jax_attn.transfer.files.mxfp4 import dequantized

rng = np.random.default_rng(0)


def theirs(blocks, scales):
    packed = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    return as_numpy(packed)


def drawn(X, fan_out, groups):
    blocks = rng.integers(0, 256, (X, fan_out, groups, 16), np.uint8)
    return {"up_blocks": blocks, "up_scales": rng.integers(0, 255, blocks.shape[:-1], np.uint8)}


def test_every_number_of_every_scale_has_transformers_bits():
    blocks = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16), (1, 256, 1, 1))
    scales = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 256, 1), (1, 1, 16))
    tensors, problems = dequantized({"up_blocks": blocks, "up_scales": scales})
    found, wanted = tensors["up"], theirs(blocks, scales)
    assert problems == []
    assert found.dtype == ml_dtypes.bfloat16
    assert np.array_equal(found.view(np.uint16), wanted.view(np.uint16))
    assert len(np.unique(found.view(np.uint16))) > 500


class Counted(LazyMapping):
    """Tensors that note which of them are read."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.tensors, self.read = tensors, []

    def __getitem__(self, key):
        self.read.append(key)
        return self.tensors[key]

    def describe(self, key):
        return describe(self.tensors[key])


def test_a_stack_is_read_alone_and_its_shape_without_reading():
    one, bias = drawn(3, 5, 2), np.ones((3, 5), np.float32)
    other = {key.replace("up", "down"): array for key, array in drawn(3, 7, 1).items()}
    held = Counted({"up_bias": bias, **one, **other})
    tensors, problems = dequantized(held)
    assert (problems, [*tensors]) == ([], ["up_bias", "up", "down"])
    assert tensors.describe("up") == Spec((3, 64, 5), "bfloat16")
    assert tensors.describe("up_bias") == Spec((3, 5), "float32")
    assert held.read == []
    found = tensors["up"]
    assert sorted(held.read) == ["up_blocks", "up_scales"]
    assert describe(found) == tensors.describe("up")
    assert np.array_equal(found.view(np.uint16), theirs(*one.values()).view(np.uint16))
    assert tensors["up_bias"] is bias


STACK = drawn(2, 3, 1)
MISFITS = {
    "no scales": {"up_blocks": STACK["up_blocks"]},
    "no blocks": {"up_scales": STACK["up_scales"]},
    "plain numbers, too": STACK | {"up": np.zeros((2, 32, 3), np.float32)},
    "scales of another shape": STACK | {"up_scales": STACK["up_scales"][:, :2]},
    "signed bytes": STACK | {"up_blocks": STACK["up_blocks"].view(np.int8)},
    "halves of a block": STACK | {"up_blocks": STACK["up_blocks"][..., :8]},
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_is_no_stack_is_named(name):
    others = {key.replace("up", "down"): array for key, array in MISFITS[name].items()}
    _, problems = dequantized(MISFITS[name] | others)
    which = "scales" if name == "no scales" else "blocks"
    assert [problem.name for problem in problems] == [f"down_{which}", f"up_{which}"]
