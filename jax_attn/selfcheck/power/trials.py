"""Try bugs on a row of the matrix: attention with the bug goes through the comparison.

It takes the port's place, without compilation, and must FAIL. A row that does not detect a bug
that it claims to detect has not shown what it claims: its verdict is INCONCLUSIVE.
"""

from functools import partial

from jax_attn.parity.judge.compare import TensorReport, deciding
from jax_attn.parity.run.inputs_and_runs import Run, wide
from jax_attn.selfcheck.matrix.preparation import Preparation
from jax_attn.selfcheck.power import mutable_attention
from jax_attn.selfcheck.power.catalogue import BUGS, WEAK
from jax_attn.selfcheck.power.kill_report import Kill


def claimed(row: Preparation) -> tuple[str, ...]:
    """List the bugs that the row claims to detect."""
    precision = row.precision or row.case.dtype
    return tuple(name for name, bug in BUGS.items() if bug.claim(row.case, row.problem, precision))


def run_with(row: Preparation, name: str, *, gradients: bool = True) -> Run:
    """Run attention with this bug."""
    solve = partial(mutable_attention.solve, plants=BUGS[name].plants, gradients=gradients)
    return row.solution(wide(row.prepared.cotangents), solve)


def try_bug(row: Preparation, name: str) -> TensorReport:
    """Return the report on the tensor that decides the verdict on this bug."""
    report = deciding(tuple(row.prepared.compare(run_with(row, name), "bug")))
    assert report is not None, "a row compares at least its output"
    return report


def is_seen(row: Preparation, name: str) -> bool:
    """Return whether the row fails this bug. Most bugs already show in its outputs."""
    return any(
        row.prepared.would_fail(run_with(row, name, gradients=gradients))
        for gradients in (False, True)
    )


def kills(row: Preparation) -> list[Kill]:
    """Try every bug that the row claims to detect."""
    return [Kill.of(name, BUGS[name].meant, row.case, try_bug(row, name)) for name in claimed(row)]


def doubts(row: Preparation) -> tuple[str, ...]:
    """Report the bugs in `WEAK` that the row claims to detect and would not."""
    return tuple(
        f"blind: would not have seen {name!r}, which this row claims to catch"
        for name in claimed(row)
        if name in WEAK and not is_seen(row, name)
    )
