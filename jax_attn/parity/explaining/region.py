"""A region in which a port goes wrong: the last right tensors, and the first wrong one."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jax_attn.parity.explaining.align import APART, apart
from jax_attn.parity.explaining.cause import Cause
from jax_attn.parity.explaining.taps.tap import Tap

Replaced = dict[int, np.ndarray]
"""Tap of the port, by index -> the value with which a run continues in its place."""


@dataclass(frozen=True)
class TapPair:
    """A tensor of both sides that is the same, or should be.

    Attributes:
      ours: the port's tensor.
      theirs: the reference's tensor.
    """

    ours: Tap
    theirs: Tap


@dataclass(frozen=True)
class Wrong(TapPair):
    """A wrong tensor, and the reference's tensor in its shape.

    Attributes:
      expected: the reference's numbers, with their axes in the port's order.
      rounding: how far rounding moves each of them.
    """

    expected: np.ndarray = field(repr=False)
    rounding: np.ndarray = field(repr=False)

    @property
    def is_off(self) -> np.ndarray:
        """Boolean array, True where numbers differ by more than rounding."""
        return ~(np.abs(self._difference) <= APART * self.rounding)

    @property
    def is_reordered(self) -> bool:
        """True if the port has the reference's numbers in another order."""
        order = np.argsort(self.expected, axis=None)
        sorted_ours = np.sort(self.ours.numbers, axis=None)
        expected, rounding = self.expected.ravel()[order], self.rounding.ravel()[order]
        return apart(sorted_ours, expected, rounding) <= APART

    @property
    def worst(self) -> tuple[tuple[int, ...], float, float]:
        """The index at which the two differ most, and the numbers of port and reference there."""
        off = np.nan_to_num(np.abs(self._difference), nan=np.inf)
        at = np.unravel_index(int(off.argmax()), off.shape)
        return tuple(map(int, at)), float(self.ours.value[at]), float(self.expected[at])

    @property
    def _difference(self) -> np.ndarray:
        ours, theirs = self.ours.numbers, self.expected
        with np.errstate(invalid="ignore"):
            return np.where(ours == theirs, 0.0, ours - theirs)


@dataclass(frozen=True)
class Region:
    """Equations of the port, one of which makes an error.

    Attributes:
      last_matched: the tensors that the equations read, the same on both sides.
      first_wrong: the tensor that they compute, and the reference's in its place.
      equations: the wrong tensors, without mere reshapes and transposes, up to `first_wrong`.
      after: a later wrong tensor, which becomes right if `first_wrong` is replaced by the
        reference's.
      again: further places at which the port has the same equation, and at which it is wrong alike.
      replaced: the wrong results of earlier regions, repaired in the run that found this one.
      causes: the causes that explain the error when they are run in the reference: the confirmed
        ones, or one that explains a part.
      tried: whether causes were looked for, before the search ended.
      repro: a self-contained script that computes on both sides `first_wrong`, or the result of the
        fused operation of which it is a step; "" if there is none.
    """

    last_matched: tuple[TapPair, ...]
    first_wrong: Wrong
    equations: tuple[Tap, ...]
    after: TapPair
    again: tuple[TapPair, ...] = ()
    replaced: Replaced = field(default_factory=dict, repr=False)
    causes: tuple[Cause, ...] = ()
    tried: bool = False
    repro: str = field(default="", repr=False)


class Found(NamedTuple):
    """A wrong place.

    whole: the region that ends at the first wrong tensor that repairs what follows. parts: narrower
    regions in which the error originates, which may be `whole` itself.
    """

    whole: Region
    parts: tuple[Region, ...]
