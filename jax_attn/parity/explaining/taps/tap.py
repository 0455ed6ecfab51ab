"""One tensor that one side computes, with its origin."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jax_attn.parity.bugs import FILL


class Place(NamedTuple):
    """The place of an operation: the path of its module, and its line as "file.py:12"."""

    module: str = ""
    source: str = ""
    is_backward: bool = False

    def __str__(self) -> str:
        where = " in ".join(filter(None, (f"`{self.module}`" if self.module else "", self.source)))
        return f"backward of {where}" if self.is_backward and where else where


@dataclass(frozen=True)
class Tap:
    """A floating-point result of one operation, or a leaf: a parameter or an input.

    Attributes:
      index: the index among the taps of its side, in the order of computation.
      op: the operation, such as "aten.bmm" or "dot_general"; "parameter" or "input" for a leaf.
      place: the module and the line that compute it, as far as they are known; in the backward
        pass, those of the operation that it differentiates. For a leaf, its name.
      value: its numbers, in float64.
      parents: the indices of the taps that the operation reads.
      is_step: whether it is inside a fused operation of torch, whose results follow.
    """

    index: int
    op: str
    place: Place
    value: np.ndarray = field(repr=False)
    parents: tuple[int, ...]
    is_step: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its axes."""
        return self.value.shape

    @property
    def is_leaf(self) -> bool:
        """True for a parameter or an input, which no operation computes."""
        return self.op in LEAVES

    @cached_property
    def numbers(self) -> np.ndarray:
        """The value with infinities for a mask's fill, since each side may use another number."""
        return numbers_of(self.value)

    @cached_property
    def tells(self) -> bool:
        """True if its numbers can identify it: they differ, and none of them is NaN."""
        finite = self.numbers[np.isfinite(self.numbers)]
        several = finite.size > 1 and bool(finite.max() > finite.min())
        return several and not self.has_nan

    @cached_property
    def has_nan(self) -> bool:
        """True if any number is NaN."""
        return bool(np.isnan(self.value).any())

    def __str__(self) -> str:
        where = str(self.place)
        return f"{self.op}{list(self.shape)}" + (f" ({where})" if where else "")


def numbers_of(value: np.ndarray) -> np.ndarray:
    """Replace fills in a value by infinities."""
    return np.where(np.abs(value) >= FILL, np.copysign(np.inf, value), value)


LEAVES = ("parameter", "input")


def ancestors(taps: Sequence[Tap], of: Iterable[int]) -> set[int]:
    """Return the indices of `of` and of all taps from which they are computed."""
    found, left = set(), list(of)
    while left:
        index = left.pop()
        if index not in found:
            found.add(index)
            left += taps[index].parents
    return found
