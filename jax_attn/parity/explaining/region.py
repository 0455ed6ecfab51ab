"""A place where a port is wrong: the last right tensors, and the first wrong one."""

from dataclasses import dataclass, field

import numpy as np

from jax_attn.parity.explaining.align import APART, apart
from jax_attn.parity.explaining.cause import Cause
from jax_attn.parity.explaining.taps.tap import Tap

Replaced = dict[int, np.ndarray]
"""A tap of the port -> the value that a run goes on with in its place."""


@dataclass(frozen=True)
class Pair:
    """The same tensor on both sides, or what should be.

    Attributes:
      ours: the port's.
      theirs: the reference's.
    """

    ours: Tap
    theirs: Tap


@dataclass(frozen=True)
class Wrong(Pair):
    """A wrong tensor, and the reference's in its shape.

    Attributes:
      expected: the reference's numbers, their axes in the port's order.
      rounding: by how much rounding moves each of them.
    """

    expected: np.ndarray = field(repr=False)
    rounding: np.ndarray = field(repr=False)

    @property
    def is_off(self) -> np.ndarray:
        """Which numbers differ by more than rounding."""
        return ~(np.abs(self._difference) <= APART * self.rounding)

    @property
    def is_reordered(self) -> bool:
        """Whether the port has the reference's numbers, in another order."""
        order = np.argsort(self.expected, axis=None)
        sorted_ours = np.sort(self.ours.numbers, axis=None)
        expected, rounding = self.expected.ravel()[order], self.rounding.ravel()[order]
        return apart(sorted_ours, expected, rounding) <= APART

    @property
    def worst(self) -> tuple[tuple[int, ...], float, float]:
        """Where the two are furthest apart; what the port has there, and the reference."""
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
      last_matched: the tensors that they read, right on both sides.
      first_wrong: what they give, and what the reference has there.
      equations: the wrong tensors, without mere reshapes and transposes; `first_wrong` the last.
      after: a wrong tensor that follows, which is the reference's where `first_wrong` is.
      replaced: what earlier regions gave wrong, and the run that found this one had right.
      causes: what was found to explain the error, run in the reference; the confirmed ones, or one
        that explains a part.
      repro: a script that runs alone, and computes on both sides `first_wrong`, or the result of
        the fused operation in which it is a step; "" where there is none.
    """

    last_matched: tuple[Pair, ...]
    first_wrong: Wrong
    equations: tuple[Tap, ...]
    after: Pair
    replaced: Replaced = field(default_factory=dict, repr=False)
    causes: tuple[Cause, ...] = ()
    repro: str = field(default="", repr=False)
