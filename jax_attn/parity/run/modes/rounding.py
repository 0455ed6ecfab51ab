"""The rounding of one perturbed run: how far each number of a result is moved."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from jax_attn.parity.judge.budget import Precision
from jax_attn.parity.run.modes import long_tensors
from jax_attn.parity.run.modes.draws import SCALE, SCALE_OF_PAIR, Draws, Key, in_parts
from jax_attn.parity.run.modes.many_runs import RunsTensor


@dataclass(frozen=True)
class DrawnRounding:
    """The roundings of a precision, drawn in order.

    written: the program's literal numbers as the run rounds them, by value and roundoff.
    """

    precision: Precision
    draws: Draws
    written: dict[tuple[float, float], float | torch.Tensor] = field(default_factory=dict)

    moved_numbers: set[float] = field(default_factory=set)

    def alike(self, x: torch.Tensor) -> torch.Tensor:
        """Draw numbers uniform in (-1, 1), the same for equal elements of x."""
        return self.draws.alike(x, self.draws.key(), self._roundoff)

    @property
    def _roundoff(self) -> float:
        return max(self.precision.store, self.precision.operand)

    def coins(self, shape: torch.Size) -> torch.Tensor:
        """Draw booleans of this shape, each True with probability 1/2."""
        return self.alike(torch.arange(1.0, 1.0 + shape.numel()).double()).reshape(shape) < 0

    def moved(self, x: torch.Tensor, by: torch.Tensor, key: Key | None = None) -> torch.Tensor:
        """Return x + by * (uniform in (-1, 1)) where that is finite, else x; overwrites `by`.

        key: the operation's key, if x is a part of its result.
        """
        own = self.draws.lifted(by)
        return self.draws.of(self._moved(self.draws.each(x), self.draws.each(own), key))

    def _moved(self, each: torch.Tensor, by: torch.Tensor, key: Key | None) -> torch.Tensor:
        """Apply `moved` to the numbers of every run, (runs, *shape)."""
        drawn = self.draws.unscaled(each, self.draws.key() if key is None else key, self._roundoff)
        return _where_finite(torch.addcmul(each, by, drawn, value=SCALE, out=by), each)

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as the precision stores it."""
        if x.is_complex():
            return self._complex(x, 2 * self.precision.store)
        if x.layout is not torch.strided:
            return x  # made of numbers that were rounded before
        key, x = self.draws.key(), self.draws.lifted(x)
        if long_tensors.is_long(x):
            return long_tensors.stored(x, key[0], self.precision, self._roundoff)
        return in_parts(lambda rows, x: self.stored_part(x, key[rows]), x)

    def stored_part(self, x: torch.Tensor, key: Key) -> torch.Tensor:
        """Return a part of an operation's stored result, drawn with the operation's key."""
        each = self.draws.each(x)
        return self.draws.of(self._moved(each, self._of_storing(each), key))

    def summed(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """Return sums that err by up to `by`, as stored; exact where `by` is 0. Overwrites x."""
        key, x, by = self.draws.key(), self.draws.lifted(x), self.draws.lifted(by)
        if long_tensors.is_long(x) and by.is_contiguous():
            return long_tensors.summed(x, by, key[0], self.precision, self._roundoff)
        return in_parts(lambda rows, x, by: self.summed_part(x, by, key[rows]), x, by, out=x)

    def summed_part(self, x: torch.Tensor, by: torch.Tensor, key: Key) -> torch.Tensor:
        """Return a part of the result of `summed`, drawn with the operation's key."""
        each, by = self.draws.each(x), self.draws.each(by).double()
        exact = by.numpy() == 0  # torch's comparisons take five times as long
        of_sum, of_storing = self.draws.unscaled_pair(each, key, self._roundoff)
        moved = _where_finite(torch.addcmul(each, by, of_sum, value=SCALE_OF_PAIR), each)
        of_storing.mul_(self._of_storing(moved))
        stored = _where_finite(of_storing.mul_(SCALE_OF_PAIR).add_(moved), moved)
        return self.draws.of(
            torch.where(torch.from_numpy(exact), each, stored) if exact.any() else stored
        )

    def _of_storing(self, each: torch.Tensor) -> torch.Tensor:
        """Return the largest error of storing each number."""
        by = (self.precision.store * each).abs_()
        # NumPy's minimum, because torch's takes four times as long.
        if not by.numel() or not by.numpy().min() >= self.precision.tiny:
            by.clamp_(min=self.precision.tiny).masked_fill_(each == 0, 0.0)  # 0 is stored exactly
        return by

    def nearby(self, x: torch.Tensor, steps: int = 1) -> torch.Tensor:
        """Return x, moved as far as a random walk of `steps` roundoffs of sums."""
        if (isinstance(x, RunsTensor) and x.is_number) or x.layout is not torch.strided:
            return x
        by = self.precision.acc * math.sqrt(steps)
        return self._complex(x, by) if x.is_complex() else self.moved(x, (by * x).abs_())

    def _complex(self, z: torch.Tensor, by: float) -> torch.Tensor:
        """Return z with both parts moved by up to `by` * |z|.

        A part of a product z is ac - bd, and may cancel: it errs by u * (|ac| + |bd|) and by what
        storing it adds, together at most 2u * |z| by the Cauchy-Schwarz inequality.
        """
        parts = torch.view_as_real(z.resolve_conj())
        by_parts = (by * z.abs())[..., None].repeat_interleave(2, -1)
        return torch.view_as_complex(self.moved(parts, by_parts))

    def approximated(self, x: torch.Tensor, by: float) -> torch.Tensor:
        """Move each number by up to `by` of itself, and all together by up to a quarter of that."""
        shared = self.draws.one()
        return self.moved(x, (by * x).abs_()).mul_(1 + by / 4 * shared)

    def number(self, value: Any) -> Any:
        """Return a literal number of the program as the precision keeps it, the same each time and
        for all elements. Any other value is returned unchanged."""
        if type(value) is not float or value in self.moved_numbers:
            return value
        if _holds(self.precision, value):
            return value
        key = value, self.precision.store
        if key not in self.written:
            moved = value * (1 + self.precision.store * self.draws.one())
            is_finite = math.isfinite(value * (1 + self.precision.store))
            self.written[key] = moved if is_finite else value
            if isinstance(moved, RunsTensor):
                moved.is_number = True
            elif isinstance(moved, float):  # a kernel's own steps receive it again
                self.moved_numbers.add(moved)
        return self.written[key]

    def divisor(self, value: Any) -> Any:
        """Return a divisor whose reciprocal is rounded as the precision keeps it."""
        kept = 1 / self.number(1 / value)
        if isinstance(kept, RunsTensor):
            kept.is_number = True
        return kept


def has_reciprocal(by: Any) -> bool:
    """Return whether a divisor is a finite, nonzero number with a nonzero reciprocal."""
    return isinstance(by, int | float) and math.isfinite(by) and by != 0 and 1 / by != 0


def _where_finite(moved: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return `moved` where it is finite, else x."""
    return moved if math.isfinite(moved.sum()) else torch.where(moved.isfinite(), moved, x)


def _holds(precision: Precision, value: float) -> bool:
    """Return whether the precision represents a number exactly, whatever its exponent."""
    return not math.isfinite(value) or math.frexp(value)[0] / precision.store % 1 == 0
