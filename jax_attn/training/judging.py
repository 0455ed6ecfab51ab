"""Train a port, and judge it by its reference's training: one report for each tensor.

Updates that differ are made again with an optimizer that computes in float64, which tells rounding
in the optimizer from another formula.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from jax_attn.parity.judge.compare import TensorReport, Verdict
from jax_attn.parity.judge.finding import Finding, Findings, findings
from jax_attn.parity.judge.result import Result
from jax_attn.parity.judge.text import joined
from jax_attn.parity.run.port import full_precision
from jax_attn.training.port_loop import PortTraining
from jax_attn.training.reference_training import (
    ReferenceTraining,
    compare_free_run,
    compare_replay,
    missing_moments,
)
from jax_attn.training.runs import MOMENT_FIELDS, Replay

if TYPE_CHECKING:
    from jax_attn.parity.explaining.explanation import Explanation


def judge(
    reference: ReferenceTraining,
    port: PortTraining,
    canaries: Findings,
    *,
    failures: Sequence[Finding] = (),
    notes: Sequence[Finding] = (),
    name: str = "training",
) -> Result:
    """Train the port, and compare its updates, its state and its free run.

    Updates that fail are made again in float64. If they pass there, only the optimizer's rounding
    differs: those runs are reported, and a note gives the drift.

    canaries: those of the same reference. failures, notes: those known before the comparison.
    """
    loop = reference.loop
    gradients = [loop.to_paths(by_key) for by_key in reference.gradients]

    def reports(dtype: str | None = None) -> tuple[Replay, list[TensorReport], list[TensorReport]]:
        replay, free_run = port.replay(gradients, dtype), port.free_run(reference.steps, dtype)
        of_free_run = compare_free_run(reference, free_run)
        return replay, list(compare_replay(reference, replay)), list(of_free_run)

    with full_precision() as (backend, pinned):
        replay, updates, free_run = reports()
        drift: tuple[Finding, ...] = ()
        if any(report.verdict is Verdict.FAIL for report in updates):
            graded = _graded(partial(reports, "float64"), partial(port.drift, gradients))
            if graded is not None:
                updates, free_run, drift = graded
    return Result(
        dtype=loop.dtype,
        backend=backend,
        tensors=(*updates, *free_run),
        failures=(
            *failures,
            *missing_moments(reference, replay),
            *_trained_buffers(reference, (*updates, *free_run)),
        ),
        doubts=canaries.doubts,
        notes=(*notes, *drift, *_not_compared(reference), *pinned, *canaries.notes),
        name=name,
        details={"steps": str(reference.steps)},
        explainer=partial(_explained, reference, port),
    )


_MOST_DRIFT = 2.0**-10
"""The largest share of an update that counts as rounding: what one rounding of float32 makes of
1 - b at b = 1 - 2**-14, which is closer to 1 than the decay of any published training."""


def _graded(
    reports: Callable[[], tuple[Replay, list[TensorReport], list[TensorReport]]],
    drift: Callable[[], dict[int, float]],
) -> tuple[list[TensorReport], list[TensorReport], tuple[Finding, ...]] | None:
    """Return the reports of runs whose optimizer computes in float64, with a note of the drift.

    None if they fail, too, if rounding moves the first update by more than `_MOST_DRIFT`, or if the
    optimizer computes only in its own dtype.
    """
    try:
        _, updates, free_run = reports()
        if any(report.verdict is Verdict.FAIL for report in updates):
            return None
        shares = {n: share for n, share in drift().items() if math.isfinite(share)}
    except Exception:  # the user's transformation may raise any error on another dtype
        return None
    return (updates, free_run, (_drift(shares),)) if shares.get(1, 1.0) <= _MOST_DRIFT else None


def _drift(shares: Mapping[int, float]) -> Finding:
    """Say that the optimizers differ by rounding alone, and how far that moves parameters."""
    told = joined([f"{share:.2g} after {n:,} updates" for n, share in shares.items()])
    return Finding(
        "optimizer-rounding",
        "port_optimizer: it makes torch's updates if it computes in float64, so it differs only by "
        "rounding in its own arithmetic. From the recorded gradients, repeated, rounding displaces "
        f"the parameters by {told.replace('1 updates', '1 update')}, as a share of the distance "
        "that they move; `parity.optax_like` rounds as torch does",
    )


def _trained_buffers(
    reference: ReferenceTraining, tensors: Iterable[TensorReport]
) -> tuple[Finding, ...]:
    """Report parameters that the port's optimizer moves, and that are buffers of the reference."""
    wrong = {tensor.name for tensor in tensors if tensor.verdict is Verdict.FAIL}
    moved = (
        f"the port's optimizer moves {path!r}, which is a buffer of the reference, so that torch "
        "does not train it: hold it outside of the parameters, or mask it in the optimizer"
        for path in sorted(reference.constants)
        if wrong & {f"update of {path}", f"moved {path}"}
    )
    return findings("buffer-trained", moved)


def _explained(reference: ReferenceTraining, port: PortTraining, result: Result) -> "Explanation":
    from jax_attn.training.explain import explain_training  # unused if the check passes

    return explain_training(result, reference, port)


def _not_compared(reference: ReferenceTraining) -> tuple[Finding, ...]:
    """Note parameters that only rounding moves, and moments without a known field in optax."""
    idle = (
        f"{path}: its gradient is zero but for rounding, which an optimizer may turn into full "
        "steps: its drift is compared only with the spread"
        for path in sorted(reference.idle)
    )
    unknown = (
        f"{name} of torch's optimizer is not compared: the corresponding field of optax's states "
        "is not known"
        for name in reference.replays.own.moments
        if name not in MOMENT_FIELDS
    )
    return (*findings("drift", idle), *findings("moment-not-compared", unknown))
