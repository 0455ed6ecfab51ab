"""The torch designs as the tests build them: small, in float64, no weight or bias near zero."""

import torch
from torch import nn

from torch_ref import DESIGNS

# Prime or at least distinct sizes: no two axes can be taken for one another.
B, T, S, N, H, KDIM, VDIM = 2, 5, 7, 3, 4, 11, 13
D = N * H
EXTRA_ARGS = {"gqa": (N,)}


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def built(name: str, *args, seed: int = 1, **kwargs) -> nn.Module:
    """The design in float64, every parameter (biases too) of order one half."""
    module = DESIGNS[name](*args, **kwargs).double().eval()
    for i, parameter in enumerate(module.parameters()):
        parameter.data = seeded(*parameter.shape, seed=100 * seed + i) / 2
    return module
