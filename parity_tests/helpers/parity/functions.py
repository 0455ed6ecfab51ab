"""A function as a module of either framework, for pairs without parameters."""

from collections.abc import Callable
from typing import Any

import torch
from flax import nnx


class TorchFunction(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **inputs: Any) -> Any:
        return self.function(*args, **inputs)


class PortFunction(nnx.Module):
    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        return self.function(*args, **inputs)
