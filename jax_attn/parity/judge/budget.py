r"""Derive from roundoff how large the errors of correct code may be; no tolerance is typed in.

The reference is run RUNS times in float64, each time with every operation's result moved by one
roundoff of the precision under test, up or down at random (`run.modes.perturbed_mode`, forward and
backward). The spread of these runs about the unperturbed one is the effect of rounding on each
number.

How far the result of one operation is moved (`Precision`, `bridge`)
    An element is moved by a draw from [-store*|x|, store*|x|], which holds every correct rounding.
    Equal numbers, in rows that are the same, are rounded alike, and so are moved alike. A number
    that is written in the program is moved by one draw for the whole run: 0.1 in bfloat16 is too
    large for every element. (This excludes a number that is only selected, such as a clamp's
    bound.) A function that a library approximates (`APPROXIMATED`) errs by more, and equal numbers
    err in the same direction, here by up to a quarter of that: where a tanh saturates, its
    derivative 1 - tanh**2 consists of this error. An activation for which torch has a kernel (a
    GELU) is split into its steps, because a port may write out the steps and store each; so is a
    softmax in bfloat16 and float16.
    A sum of n terms, in any one order, rounds every partial sum. Partial sums walk from 0 to the
    total s: on average a Brownian bridge about the straight line, so that the sum of their squares
    is n*(s**2/3 + v/6) with v the sum of the squared terms; each product adds its own rounding, v.
    Hence a draw of up to acc*sqrt(v + n*(s**2/3 + v/6)). In addition, terms below the smallest
    number kept are lost: for n terms, up to sqrt(n) times that number.
    A softmax in a fused kernel computes the probabilities exp(s - l) of a row from one
    l = log(sum(exp(s))), at least backward: l is stored rounded, by up to acc*|l|, and all
    probabilities err by that one factor. If attention is peaked, this is most of their error: a
    probability near 1 that is computed as exp(s - max) over a sum hardly errs at all. (In a row
    that a mask's fill hides completely, l is counted from the fill: added to -1e9, log(n) would be
    lost.)
    A sum that is 0, or equals one of its summands, is exact: a score added to a fill is lost.
    Operands of a matrix unit that rounds them (TF32, the TPU's bfloat16 pass) add up to
    operand*sqrt(2*v).

From spread to budget (`Budget.of`)
    A few runs estimate the spread of one element badly, but all elements of a tensor together
    estimate the tensor's spread well: the two are averaged with equal weight (a moderated variance,
    Smyth 2004). The budget is the two-sided Student quantile, with twice as many degrees of freedom
    as runs, at which correct code would exceed it anywhere in the tensor once in 1/FALSE_ALARM
    tensors. The same holds for the projection <o' - o, o>/<o, o>: it detects a small error that all
    elements share, such as a wrong scale, which single elements cannot show in bfloat16.

Roundoffs: half a unit in the last place, 2**-p for p bits of significand.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

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
"""Operator -> its largest error in float32 of XLA:CPU, in units of acc; others only round."""


@dataclass(frozen=True)
class Precision:
    """The roundoffs of a precision.

    operand, acc, store: relative roundoff of a product's operands, of each addition in a sum, and
    of a stored result. tiny: absolute roundoff, half the smallest number kept.
    """

    acc: float
    store: float
    operand: float = 0.0
    tiny: float = 2.0**-126  # XLA:CPU and the TPU flush float32 subnormals


_FLUSHED = Precision.tiny  # that of float32, in which products of float16 are added up, too

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
    """Return (a, b, c) such that a sum s of terms x errs by up to sqrt(a*s**2 + b*sum(x**2) + c).

    terms: the number of terms; for several sums an array or tensor, as are then (a, b, c).
    """
    acc, operand = precision.acc**2, precision.operand**2
    lost = min(precision.tiny, _FLUSHED) ** 2
    return acc * terms / 3, acc * (1 + terms / 6) + 2 * operand, terms * lost


@dataclass(frozen=True)
class Budget:
    """The errors that one tensor may have.

    element: limit per element; to save memory, rounded up to float32 if it can hold the precision.
    rms: limit of the tensor's RMS error. floor: its expected RMS error. projection: limit of
    <o'-o, o>/<o, o>. zero: RMS below which the tensor cannot be distinguished from 0 in float64,
    the oracle's precision. moves: for integers and booleans, by how much any run changed each
    element; else None.
    """

    element: np.ndarray
    rms: float
    floor: float
    projection: float
    zero: float
    moves: np.ndarray | None = None

    @classmethod
    def of(cls, center: np.ndarray, runs: Iterable[np.ndarray], precision: Precision) -> "Budget":
        """Derive the budget of a tensor; it is NaN where the centre is not finite.

        center: the unperturbed float64 tensor. runs: the perturbed tensors.
        """
        spread = Spread(center, precision)
        for run in runs:
            spread.add(run)
        return spread.budget()


# If a run is not finite, the tensor has no budget, which `judge` reports.
_QUIET = np.errstate(invalid="ignore", over="ignore")


class Spread:
    """The spread of perturbed runs of one tensor about its centre; adds up runs, keeps none."""

    def __init__(self, center: np.ndarray, precision: Precision, *, is_decided: bool = False):
        """Start with no runs.

        center: the unperturbed float64 tensor; it is never written. is_decided: whether it holds
        integers or booleans.
        """
        self.center, self.precision = center, precision
        finite = np.isfinite(center)
        self._finite = None if finite.all() else finite
        self._core = self._compared(center)
        self._norm = dot(self._core, self._core)
        self._squares = np.zeros(self._core.size)
        self._each: list[float] = []  # RMS of the deviations of each run
        self._shared: list[float] = []  # projection of the deviations of each run
        self._moves = np.zeros(center.shape) if is_decided else None

    @_QUIET
    def add(self, run: np.ndarray) -> None:
        """Add one perturbed run of the tensor, float64."""
        if self._moves is not None:
            np.maximum(self._moves, np.abs(run - self.center), out=self._moves)
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
        """Return the budget from the runs so far, of which there must be at least one."""
        if not self._core.size:
            nan = math.nan
            return Budget(np.full(self.center.shape, nan), nan, nan, nan, nan, self._moves)
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
            moves=self._moves,
        )

    def _compared(self, tensor: np.ndarray) -> np.ndarray:
        """Return the elements where the centre is finite, flat; a view if that is everywhere."""
        return tensor.reshape(-1) if self._finite is None else tensor[self._finite]


def _rounded_up(a: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert to `dtype`, rounding up."""
    with np.errstate(over="ignore"):
        narrow = a.astype(dtype)
    return np.where(narrow < a, np.nextafter(narrow, dtype.type(math.inf)), narrow)


# --- the quantile of Student's t, with which a spread of few runs becomes a bound -----------------
#
# scipy has it too, but takes longer to import than a small port takes to judge.


@cache
def student_quantile(tail: float, freedom: int) -> float:
    """Return the t for which P(|Student's t| > t) = tail, to a relative 1e-13.

    Newton's method on log P as a function of log t. The function is concave, so that from the right
    each step stays on the right of the solution; a step to the right is bounded.
    """
    t = 1.0
    for _ in range(_MOST_STEPS):
        share = _tail(t, freedom)
        slope = -2 * t * _density(t, freedom) / share
        step = math.log(tail / share) / slope
        t *= math.exp(min(step, 2.0))
        if abs(step) < _SMALLEST_STEP:
            break
    return t


_MOST_STEPS, _SMALLEST_STEP = 100, 1e-14
_NEGLIGIBLE = 1e-17


def _tail(t: float, freedom: int) -> float:
    """Return P(|Student's t| > t), the incomplete beta function of x = freedom / (freedom + t^2).

    All terms of its power series are positive, so that none of a small tail is lost.
    """
    x, a = freedom / (freedom + t * t), freedom / 2
    power, total, n = 1.0, 0.0, 0
    while (term := power / (a + n)) > total * _NEGLIGIBLE:
        total, n = total + term, n + 1
        power *= x * (n - 0.5) / n
    return math.exp(a * math.log(x) - _log_beta(a)) * total


def _density(t: float, freedom: int) -> float:
    a = freedom / 2
    exponent = -(a + 0.5) * math.log1p(t * t / freedom) - _log_beta(a) - math.log(freedom) / 2
    return math.exp(exponent)


def _log_beta(a: float) -> float:
    """Return log B(a, 1/2)."""
    return math.lgamma(a) + math.lgamma(0.5) - math.lgamma(a + 0.5)
