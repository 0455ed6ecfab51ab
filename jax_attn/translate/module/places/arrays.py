"""Write arrays of numbers in the source, and keep the large ones as attributes."""

import ast
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import nn

from jax_attn.transfer import as_numpy
from jax_attn.translate.rules.expression import DTYPES, Written, literal
from jax_attn.translate.tracing.traced import TracedModule


def regular(value: torch.Tensor) -> str | None:
    """Write an array that is empty, one number throughout, or counts; None if it does neither."""
    dtype, shape = f"jnp.{DTYPES[value.dtype]}", tuple(value.shape)
    flat = value.detach().reshape(-1)
    if not flat.numel():
        return f"jnp.zeros({shape}, {dtype})"
    if flat.numel() > 1 and _bits(flat) == _bits(flat[:1].expand_as(flat)):
        return f"jnp.full({shape}, {ast.unparse(literal(flat[0].item()))}, {dtype})"
    is_bool = flat.dtype is torch.bool
    if not is_bool and flat.numel() > 1 and torch.equal(flat, torch.arange(flat.numel()).to(flat)):
        count = f"jnp.arange({flat.numel()}, dtype={dtype})"
        return count if len(shape) == 1 else f"{count}.reshape({shape})"
    return None


def _bits(value: torch.Tensor) -> tuple[str, bytes]:
    """Return what is equal for equal numbers alone: -0.0 is none of 0.0, and NaN is itself."""
    array = as_numpy(value.detach())
    return str(array.dtype), array.tobytes()


def array_text(value: torch.Tensor) -> str:
    """Write an array, number by number unless it is regular."""
    if (text := regular(value)) is not None:
        return text
    held = value.detach()
    numbers = held.float().numpy() if held.is_floating_point() else held.numpy()
    return f"jnp.array({_shortest(numbers)}, jnp.{DTYPES[value.dtype]})"


def _shortest(numbers: np.ndarray) -> str:
    """Write numbers with as few digits as give the same bits again."""
    if numbers.ndim:
        return "[" + ", ".join(map(_shortest, numbers)) + "]"
    if not np.isfinite(numbers):
        return str(numbers).replace("inf", "jnp.inf").replace("nan", "jnp.nan")
    return str(numbers)


# Larger arrays are saved with the weights.
LARGEST_LITERAL = 128


class KeptConstants:
    """Hold the constants of the traces of one reference; those of equal values are one.

    Attributes:
      values: the constants by name.
      attributes: the attributes that hold large ones, by the module and the constant.
    """

    def __init__(self, traces: Sequence[TracedModule]) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.attributes: dict[str, dict[str, str]] = {}
        self._first = {
            name: self._kept(name, value) for one in traces for name, value in one.constants.items()
        }

    def _kept(self, name: str, value: torch.Tensor) -> str:
        """Return the first name of a constant, and keep the constant if it is new."""
        for known, other in self.values.items():
            if value.shape == other.shape and _bits(value) == _bits(other):
                return known
        self.values[name] = value
        return name

    def value(self, name: str) -> torch.Tensor | None:
        """Return a constant, or None for the name of another tensor."""
        return self.values.get(self._first.get(name, name))

    def attribute(self, owner: str, name: str, taken: Collection[str]) -> str:
        """Return the attribute of a module that holds a large constant; no other has its name."""
        held = self.attributes.setdefault(owner, {})
        free = "constant"
        while free in taken or free in held.values():
            free += "_"
        return held.setdefault(self._first[name], free)


def is_large(value: torch.Tensor) -> bool:
    """Return whether a constant is too long to be written where it is read."""
    return value.numel() > LARGEST_LITERAL and regular(value) is None


def as_array(variable: Written) -> Written:
    """Write `variable[...]`; `tidy` takes the index away where the variable itself serves."""
    return ast.Subscript(variable, ast.Constant(...), ast.Load())


def held_tensor(module: nn.Module, name: str) -> torch.Tensor:
    value = {**module._parameters, **module._buffers}[name]
    assert value is not None
    return value
