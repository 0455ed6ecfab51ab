"""Test whether a failing port gives the same numbers each time, and under each transform."""

from collections.abc import Mapping

import numpy as np

from jax_attn.parity.judge.budget import Budget
from jax_attn.parity.judge.finding import Finding
from jax_attn.parity.judge.text import joined, quoted
from jax_attn.parity.run.inputs_and_runs import COMPARED, Run


def other_numbers(
    run: Run, again: Run, budgets: Mapping[str, Mapping[str, Budget]], transform: str
) -> tuple[Finding, ...]:
    """Return a failure if two runs of the same call differ in a tensor by more than its budget.

    Smaller differences are rounding, because some devices add up sums in another order each time.
    """
    moved = [
        f"{name}" if kind == "output" else f"{kind} {name}"
        for kind in COMPARED
        for name, first in run.kinds[kind].items()
        if _apart(first, again.kinds[kind].get(name), budgets[kind].get(name))
    ]
    if not moved:
        return ()
    failure = (
        f"{transform}: the port gives other numbers each time: two runs of the same module on the "
        f"same inputs differ in {quoted(moved)}; it may draw random numbers outside of nnx.Rngs, "
        "read the time, or keep state outside of its Variables"
    )
    return (Finding("other-numbers", failure),)


def not_finite_under_some(is_finite: Mapping[str, bool]) -> tuple[Finding, ...]:
    """Return a failure if outputs are finite under one transform and not under another.

    is_finite: whether all outputs are finite, by transform. They may differ because XLA:CPU rounds
    `fill * c - max` once, while eager operations round the product and the difference separately.
    """
    lost = [transform for transform, finite in is_finite.items() if not finite]
    if not lost or len(lost) == len(is_finite):
        return ()
    kept = joined([transform for transform in is_finite if transform not in lost])
    failure = (
        f"the port's outputs are finite under {kept} and not under {joined(lost)}: it takes "
        "another path there, or different rounding makes the same numbers overflow or divide by "
        "zero"
    )
    if "eager" not in lost:
        failure += (
            "; this is known to happen if the mask of a softmax adds a finite fill (`finfo.min`) "
            "that is scaled afterwards: in the compiled program, product and maximum are rounded "
            "differently, and a row in which every key is hidden may be lost; to avoid it, scale "
            "the scores before the mask is added"
        )
    return (Finding("finite-under-some", failure),)


def _apart(first: np.ndarray, second: np.ndarray | None, budget: Budget | None) -> bool:
    if second is None or first.shape != second.shape:
        return True
    fits = budget is not None and budget.element.shape == first.shape
    allowed = budget.element if budget is not None and fits else 0.0
    with np.errstate(invalid="ignore"):
        near = np.abs(first - second) <= allowed
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    return not (near | same).all()
