"""What a module makes of no input rounds, in a budget, as the module keeps it."""

import numpy as np
import pytest
import torch

from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.reference import Reference

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


class Written(Turned):
    """The same, by way of a constant that a parameter is written over."""

    def forward(self, x):
        factor = torch.zeros(T)
        factor.copy_(self.gain.expand(T))
        return x * torch.cos(factor * torch.arange(T)).to(x.dtype)


class WrittenThroughAView(Turned):
    def forward(self, x):
        factor = torch.zeros(T + 1)
        factor[0::2] = self.gain
        factor[1::2] = self.gain
        return x * torch.cos(factor[:T] * torch.arange(T)).to(x.dtype)


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
    "written over by a parameter": Written(torch.float32),
    "written over by a parameter, through a view": WrittenThroughAView(torch.float32),
    "by other operators in float64": Fickle(torch.float32),
}


@pytest.mark.parametrize("name", LESS_KNOWN)
def test_what_is_no_constant_or_not_the_same_one_rounds_as_all_else(name):
    assert error(LESS_KNOWN[name]) > 20 * 2.0**-8


def test_in_float32_all_rounds_alike():
    assert error(Turned(torch.float32), "float32") > 20 * 2.0**-24


class Table(Turned):
    """The cosines alone, cast: a constant as an output."""

    def forward(self, x):
        angles = torch.arange(T).to(self.dtype) * 1.0
        return {"cos": torch.cos(angles).to(x.dtype), "output": self.gain * x}


def test_a_constant_that_is_cast_is_known_as_well_as_what_it_is_cast_to():
    module = Table(torch.float32).to(torch.bfloat16)
    reference = Reference(module, None, Inputs((X,), {}))
    exact = reference.exact({}).outputs["cos"]
    budget = reference.spread("bfloat16", {})["output"]["cos"]
    own = reference.run("bfloat16", {}).outputs["cos"].astype(np.float64)
    assert np.all(np.abs(own - exact) <= budget.element), "what the module itself gives"
    assert budget.floor < 2 * 2.0**-8, "the angles in float32 all the same"


class Buffered(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("two", torch.tensor(2.0))

    def forward(self, x):
        return self.gain * self.two * x


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_module_may_have_buffers(precision):
    assert (
        0 < error(Buffered(), precision) < 4 * {"float32": 2.0**-24, "bfloat16": 2.0**-8}[precision]
    )
