"""The quantile of Student's t, with which a spread of few runs becomes a bound.

scipy has it too, but takes longer to import than a small port takes to judge.
"""

import math
from functools import cache


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
