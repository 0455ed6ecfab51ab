"""What a module makes of no input rounds, in a budget, as the module keeps it."""

import numpy as np
import pytest
import torch

from jax_attn.parity.run_torch import Reference
from jax_attn.parity.signature import Inputs

T = 257
X = np.random.default_rng(0).standard_normal((2, T)).astype(np.float32)


class Turned(torch.nn.Module):
    """x at position t times the cosine of t radians, the angles made in a dtype of their own."""

    def __init__(self, dtype):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(()))
        self.dtype = dtype

    def forward(self, x):
        angles = torch.arange(T).to(self.dtype or x.dtype) * 1.0
        return self.gain * x * torch.cos(angles).to(x.dtype)


class Grown(Turned):
    """The same, the angles multiplied by a parameter."""

    def forward(self, x):
        angles = torch.arange(T).to(self.dtype) * self.gain
        return x * torch.cos(angles).to(x.dtype)


class InPlace(Turned):
    """The same, the angles written over by what depends on a parameter."""

    def forward(self, x):
        angles = torch.arange(T).to(self.dtype)
        angles.mul_(self.gain)
        return x * torch.cos(angles * 1.0).to(x.dtype)


class Fickle(Turned):
    """The same, by way of another operator in float64: the order of constants is another."""

    def forward(self, x):
        angles = torch.arange(T).to(self.dtype)
        angles = angles / 1.0 if x.dtype is torch.float64 else angles * 1.0
        return self.gain * x * torch.cos(angles).to(x.dtype)


def error(module, precision="bfloat16"):
    """The RMS error that the budget expects of the output, about 1 itself."""
    module = module.to(getattr(torch, precision))
    return Reference(module, None, Inputs((X,), {})).spread(precision, {})["output"]["output"].floor


def test_angles_kept_in_float32_are_known_that_well():
    # Two products and a cosine, each stored in bfloat16; 256 radians stored so err by one half.
    assert error(Turned(torch.float32)) < 3 * 2.0**-8
    assert error(Turned(None)) > 20 * 2.0**-8, "angles in x's own dtype"


LESS_KNOWN = {
    "made of a parameter": Grown(torch.float32),
    "written over by what is made of a parameter": InPlace(torch.float32),
    "by other operators in float64": Fickle(torch.float32),
}


@pytest.mark.parametrize("name", LESS_KNOWN)
def test_what_is_no_constant_or_not_the_same_one_rounds_as_all_else(name):
    assert error(LESS_KNOWN[name]) > 20 * 2.0**-8


def test_in_float32_all_rounds_alike():
    assert error(Turned(torch.float32), "float32") > 20 * 2.0**-24
