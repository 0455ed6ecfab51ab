"""Frequencies held in a narrow dtype are told with the error of their angles; other arrays not."""

import re
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity.findings import sentences
from jax_attn import parity
from jax_attn.parity import Verdict, check
from jax_attn.parity.checking.frequencies import rounded

D, LENGTH = 22, 4000
EXACT = 10000.0 ** (-np.arange(0, D, 2) / D)


class Rotary(torch.nn.Module):
    def __init__(self, *, narrow, length):
        super().__init__()
        dtype = torch.bfloat16 if narrow else torch.float32
        self.register_buffer("inv_freq", torch.tensor(EXACT).to(dtype), persistent=False)
        self.config = SimpleNamespace(max_position_embeddings=length)

    def forward(self, x, positions):
        angles = positions[..., None].float() * self.inv_freq.float()
        return x * angles.cos().to(x.dtype)


class RotaryPort(nnx.Module):
    def __init__(self, *, narrow):
        dtype = jnp.bfloat16 if narrow else jnp.float32
        self.inv_freq = nnx.Variable(jnp.array(EXACT, dtype))

    def __call__(self, x, positions):
        angles = positions[..., None].astype(jnp.float32) * self.inv_freq[...].astype(jnp.float32)
        return x * jnp.cos(angles).astype(x.dtype)


INPUTS = {
    "x": np.random.default_rng(0).standard_normal((2, 3, D // 2)),
    "positions": np.array([[0, 1, 2], [3, 1, 4]]),
}
OPTIONS = {"dtype": "bfloat16", "transforms": ("jit",)}
# name -> whether reference and port hold them in bfloat16 -> whose are told
SIDES = {
    "both": (True, True, ["reference", "port"]),
    "the reference": (True, False, ["reference"]),
    "the port": (False, True, ["port"]),
    "neither": (False, False, []),
}


@pytest.mark.parametrize("name", SIDES)
def test_each_side_that_holds_them_rounded_is_told_with_the_error_at_the_last_position(name):
    ours, theirs, told = SIDES[name]
    reference, port = Rotary(narrow=ours, length=LENGTH), RotaryPort(narrow=theirs)
    result = check(reference, port, INPUTS, **OPTIONS)
    assert result.verdict is Verdict.PASS, str(result)
    said = sentences(result, "narrow-frequencies")
    assert [re.search("the (reference|port) ", sentence)[1] for sentence in said] == told
    held = EXACT.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
    really = np.abs(held - EXACT).max() * (LENGTH - 1)
    for sentence in said:
        (bound,) = re.findall(r"position 3,999 is off by up to (\S+) radians", sentence)
        assert really <= float(bound) * 1.05 <= 4 * really  # it is printed by two digits


def test_a_golden_reference_tells_them_alike():
    reference, port = Rotary(narrow=True, length=LENGTH), RotaryPort(narrow=True)
    golden = parity.prepare(reference, INPUTS, dtype="bfloat16")
    want = check(reference, port, INPUTS, **OPTIONS)
    got = check(golden, port, transforms=("jit",))
    assert sentences(got, "narrow-frequencies") == sentences(want, "narrow-frequencies")


# name -> name of the array, its numbers, whether they are frequencies
ARRAYS = {
    "named, scaled in part": ("rope.inv_freq", np.where(EXACT < 0.01, EXACT / 8, EXACT), True),
    "named, of one row": ("rope.inv_freq", EXACT[None], True),
    "named otherwise": ("rope.theta", EXACT, True),
    "slopes of ALiBi": ("slopes", 2.0 ** -(np.arange(1, 13) / 1.5), False),
    "powers of 2": ("inv_freq", 2.0 ** -np.arange(11), False),
    "three of them": ("inv_freq", EXACT[:3], False),
    "a norm's weight": ("weight", 1 + 0.1 * np.random.default_rng(0).standard_normal(11), False),
    "weights of one number": ("weight", np.ones(11), False),
    "a line": ("weight", np.linspace(1, 0.1, 11), False),
    "a frequency per word": ("word_freq", np.linspace(7, 1, 11), False),
    "a matrix": ("inv_freq", np.stack([EXACT, EXACT / 2]), False),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ARRAYS)
def test_only_frequencies_in_a_narrow_dtype_are_told(name, dtype):
    path, numbers, are_told = ARRAYS[name]
    held = {path: numbers.astype(np.float32).astype(jnp.dtype(dtype))}
    notes = list(rounded(held, "buffer", "reference", LENGTH))
    assert len(notes) == (are_told and dtype != "float32")
