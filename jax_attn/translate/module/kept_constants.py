"""The constants of a traced reference, and the attributes that hold the large ones."""

from collections.abc import Sequence

import torch

from jax_attn.translate.module.arrays import regular
from jax_attn.translate.tracing.traced import TracedModule

# Larger arrays are saved with the weights.
LARGEST_LITERAL = 128


class KeptConstants:
    """The constants of the traces of one reference; those of equal values are one.

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
            if value.dtype == other.dtype and torch.equal(value, other):
                return known
        self.values[name] = value
        return name

    def value(self, name: str) -> torch.Tensor | None:
        """Return a constant, or None for the name of another tensor."""
        return self.values.get(self._first.get(name, name))

    def attribute(self, owner: str, name: str) -> str:
        """Return the attribute of a module that holds a large constant."""
        held = self.attributes.setdefault(owner, {})
        return held.setdefault(self._first[name], "constant" + "_" * len(held))


def is_large(value: torch.Tensor) -> bool:
    """Return whether a constant is too long to be written where it is read."""
    return value.numel() > LARGEST_LITERAL and regular(value) is None
