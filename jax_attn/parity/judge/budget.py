r"""How large an error correct code may make: from roundoff, never typed in.

The reference is run a handful of times in float64, each time with every operation's
result moved by one roundoff of the precision under test, up or down at random
(`run.modes.perturbed_mode`, forward and backward). How far the runs spread about the
unperturbed one is what rounding alone does to each number.

What one operation is moved by (`Precision`, `bridge`)
    An element by a draw from [-store*|x|, store*|x|], which holds every correct rounding.
    Equal numbers, of rows that are the same, are rounded alike, and so are moved alike. A number
    that is written in the program is moved by one draw for the whole run: 0.1 in bfloat16
    is too large for every element. (Not one that is only chosen, as a clamp's bound is.) What a
    library approximates (`APPROXIMATED`) is off by more, and leans one way where numbers are
    alike, here by up to a quarter of that: where a tanh saturates, its derivative 1 - tanh**2 is
    what is left of it. An activation that torch has a kernel for (a GELU) is taken apart, as a
    port writes its steps out and keeps each; so is a softmax in bfloat16 and float16.
    A sum of n terms, in any one order, rounds every partial sum. Partial sums walk from 0
    to the total s: on average a Brownian bridge about the straight line, so that the sum
    of their squares is n*(s**2/3 + v/6) with v the sum of the squared terms; each product
    adds its own rounding, v. Hence a draw of up to acc*sqrt(v + n*(s**2/3 + v/6)). Terms
    that are too small to be kept are lost: of n, up to sqrt(n) times the smallest, beside it.
    A softmax makes the probabilities exp(s - l) of a row from one l = log(sum(exp(s))) in a
    fused kernel, backward at least: l is kept rounded, by up to acc*|l|, and they all err by
    that one factor. Where attention is peaked this is most of what they err by: a
    probability near 1 that is exp(s - max) over a sum hardly errs at all. (In a row that a mask's
    fill hides throughout, l is counted from the fill: beside -1e9 no log(n) would be left.)
    A sum that is 0, or one of its summands, is exact: beside a fill a score is lost.
    Operands of a matrix unit that rounds them (TF32, the TPU's bfloat16 pass) add up to
    operand*sqrt(2*v).

From spread to budget (`Budget.of`)
    Few runs estimate one element's spread badly, all of a tensor's elements together
    estimate the tensor's well: the two are averaged with equal weight (a moderated
    variance, Smyth 2004). The budget is the two-sided Student quantile, with twice as many
    degrees of freedom as runs, at which correct code would exceed it anywhere in the tensor
    once in 1/FALSE_ALARM tensors. What holds for an element holds for the projection
    <o' - o, o>/<o, o>: it sees a small error shared by all elements, as of a scale, which
    the elements one by one cannot show in bfloat16.

Roundoffs: half a unit in the last place, 2**-p for p bits of significand.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from jax_attn.parity.judge.parts import dot, parts

RUNS = 16
FALSE_ALARM = 1e-6
APPROXIMATED = {
    "erf": 8,
    "expm1": 8,
    "log1p": 4,
    "sigmoid": 3,
    "tanh": 8,
}
"""operator -> its largest error in acc, in float32 of XLA:CPU; of others what rounding makes."""


@dataclass(frozen=True)
class Precision:
    """operand, acc, store: relative roundoff of a product's operands, of each addition in a
    sum, of a stored result. tiny: absolute, half the smallest number kept."""

    acc: float
    store: float
    operand: float = 0.0
    tiny: float = 2.0**-126  # XLA:CPU and the TPU flush float32 subnormals


_FLUSHED = Precision.tiny  # of float32, in which the products of float16 are added up, too

PRECISIONS = {
    # The oracle is float64 too and rounds as much again: twice the roundoff.
    "float64": Precision(acc=2.0**-52, store=2.0**-52, tiny=2.0**-1022),
    "float32": Precision(acc=2.0**-24, store=2.0**-24),
    "bfloat16": Precision(acc=2.0**-24, store=2.0**-8),
    "float16": Precision(acc=2.0**-24, store=2.0**-11, tiny=2.0**-25),
    "tf32": Precision(acc=2.0**-24, store=2.0**-24, operand=2.0**-11),
    "mxu": Precision(acc=2.0**-24, store=2.0**-24, operand=2.0**-8),
}


def bridge(terms: Any, precision: Precision) -> tuple[Any, Any, Any]:
    """(a, b, c): a sum s of `terms` terms x errs by up to sqrt(a*s**2 + b*sum(x**2) + c).

    terms: a number, or those of several sums as an array or tensor, as (a, b, c) are then.
    """
    acc, operand = precision.acc**2, precision.operand**2
    lost = min(precision.tiny, _FLUSHED) ** 2
    return acc * terms / 3, acc * (1 + terms / 6) + 2 * operand, terms * lost


def student_quantile(tail: float, freedom: int) -> float:
    """The t for which P(|Student's t| > t) = tail."""
    return float(-stdtrit(freedom, tail / 2))


@dataclass(frozen=True)
class Budget:
    """What one tensor may err by.

    element: per element; of precisions that float32 holds rounded up to it, as there are many.
    rms: of the whole tensor. floor: its expected RMS error. projection: of <o'-o, o>/<o, o>.
    zero: RMS below which the tensor cannot be told from 0 in float64, the oracle's precision.
    """

    element: np.ndarray
    rms: float
    floor: float
    projection: float
    zero: float

    @classmethod
    def of(cls, center: np.ndarray, runs: Iterable[np.ndarray], precision: Precision) -> "Budget":
        """center: the unperturbed float64 tensor; runs: the perturbed ones.

        Where the centre is not finite there is no budget: NaN.
        """
        spread = Spread(center, precision)
        for run in runs:
            spread.add(run)
        return spread.budget()


# A run that is not finite leaves the tensor without a budget, which `judge` reports.
_QUIET = np.errstate(invalid="ignore", over="ignore")


class Spread:
    """How far perturbed runs of one tensor lie from its centre: added up run by run, none kept."""

    def __init__(self, center: np.ndarray, precision: Precision):
        """center: the unperturbed float64 tensor; it is read, never written."""
        self.center, self.precision = center, precision
        finite = np.isfinite(center)
        self._finite = None if finite.all() else finite
        self._core = self._compared(center)
        self._norm = dot(self._core, self._core)
        self._squares = np.zeros(self._core.size)
        self._each: list[float] = []  # of each run: the RMS of its deviations, their projection
        self._shared: list[float] = []

    @_QUIET
    def add(self, run: np.ndarray) -> None:
        """Count one perturbed run of the tensor, float64."""
        run, total, shared = self._compared(run), 0.0, 0.0
        for part in parts(self._core.size):
            deviations, core = run[part] - self._core[part], self._core[part]
            shared += dot(deviations, core)
            total += dot(deviations, deviations)
            self._squares[part] += np.square(deviations, out=deviations)
        self._each.append(math.sqrt(total / max(run.size, 1)))
        self._shared.append(shared / self._norm if self._norm > 0 else 0.0)

    @_QUIET
    def budget(self) -> Budget:
        """What the tensor may err by, from the runs so far: at least one."""
        if not self._core.size:
            return Budget(np.full(self.center.shape, math.nan), *[math.nan] * 4)
        runs, precision = len(self._each), self.precision
        floor = math.sqrt(np.mean(self._squares) / runs)
        element = student_quantile(FALSE_ALARM / self._core.size, 2 * runs)
        alone = student_quantile(FALSE_ALARM, runs)
        dtype = np.dtype(np.float32 if precision.tiny >= _FLUSHED else np.float64)
        elements = np.full(self.center.shape, math.nan, dtype)
        allowed = elements.reshape(-1) if self._finite is None else np.empty_like(self._core, dtype)
        for part in parts(self._core.size):
            wide = element * np.sqrt((self._squares[part] / runs + floor**2) / 2) + precision.tiny
            allowed[part] = _rounded_up(wide, dtype)
        if self._finite is not None:
            elements[self._finite] = allowed
        return Budget(
            element=elements,
            rms=float(np.mean(self._each) + alone * np.std(self._each)) + precision.tiny,
            floor=floor,
            projection=alone * math.sqrt(np.mean(np.square(self._shared))),
            zero=element * floor * 2.0**-52 / max(precision.store, precision.operand),
        )

    def _compared(self, tensor: np.ndarray) -> np.ndarray:
        """Its elements where the centre is finite, flat; the tensor itself where that is all."""
        return tensor.reshape(-1) if self._finite is None else tensor[self._finite]


def _rounded_up(a: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """As `dtype`, no number below what it was."""
    with np.errstate(over="ignore"):
        narrow = a.astype(dtype)
    return np.where(narrow < a, np.nextafter(narrow, dtype.type(math.inf)), narrow)


def projection(got: np.ndarray, want: np.ndarray) -> float:
    """<got - want, want> / <want, want>: the relative error shared by all elements."""
    norm = float(np.square(want).sum())
    return float(((got - want) * want).sum()) / norm if norm > 0 else 0.0
