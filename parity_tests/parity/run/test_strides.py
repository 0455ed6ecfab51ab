"""A perturbed run calls the operators of an exact one: torch chooses some of them by strides."""

import numpy as np
import torch

from jax_attn.parity.judge.budget import PRECISIONS
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.modes.float64_mode import Float64
from jax_attn.parity.run.modes.perturbed_mode import Perturbed
from jax_attn.parity.run.reference import Reference


class Patches(torch.nn.Module):
    """Numbers whose axes are not in the order of their strides, forward and backward."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 5, 3, stride=2)
        self.norm, self.linear = torch.nn.LayerNorm(5), torch.nn.Linear(5, 7)

    def forward(self, x):
        patches = self.conv(x).flatten(2).mT
        return self.linear(self.norm(patches)).mT.log_softmax(1).mT


def test_strides_choose_the_same_operators_in_a_perturbed_run():
    rng = np.random.default_rng(0)
    inputs = Inputs((rng.standard_normal((2, 3, 11, 9)).astype(np.float32),), {})
    reference = Reference(Patches(), None, inputs)
    cotangents = {"output": rng.standard_normal((2, 20, 7)).astype(np.float32)}
    called = {}
    for base, args in ((Float64, ()), (Perturbed, (PRECISIONS["float32"], 1))):

        class Logged(base):
            names = called.setdefault(base, [])

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                self.names.append(str(func))
                return super().__torch_dispatch__(func, types, args, kwargs)

        reference.under(Logged(*args), cotangents)
    assert called[Float64] == called[Perturbed]
