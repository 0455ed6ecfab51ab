"""Judge a port that is asked: the half of a check that imports neither framework."""

from dataclasses import replace
from functools import partial

from jax_attn.parity.checking.by_convention import with_convention
from jax_attn.parity.checking.judging import judge_port
from jax_attn.parity.checking.probes import OF_OTHER_INPUTS, PROBES, PortSide
from jax_attn.parity.checking.reference_errors import without_reference_errors
from jax_attn.parity.checking.reference_side import ReferenceSide
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.judge.finding import Finding, Findings
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.asked_port import AskedPort, checked_in
from jax_attn.parity.run.inputs_and_runs import float_dtype, holds


def judged(prepared: ReferenceSide, side: PortSide) -> Result:
    """Judge a port by a prepared reference, and by what the probes find of it.

    Raises ValueError if only gradients fail and no output of the reference has one.
    """
    result = prepared.judged_again(_judged_by(prepared, side), partial(_judged_by, side=side))
    result = with_convention(prepared.by_either, side.alone, side.weights.to_torch, result)
    if problems := _gradient_problems(prepared, result):
        raise ValueError("\n".join(problems))
    return with_coarse_dtype(side.alone, result)


def _judged_by(prepared: ReferenceSide, side: PortSide) -> Result:
    """Judge a port by the budgets of `prepared`: the first of a narrow dtype, or either."""
    found = Findings.merged(probe.findings(prepared, side) for probe in PROBES)
    result = judge_port(
        prepared,
        side.port,
        side.transforms,
        to_torch=side.weights.to_torch,
        beside=side.beside,
        paired=side.weights.paired,
        passed_over=side.passed_over,
        **found._asdict(),
    )
    if result.verdict is Verdict.FAIL:
        return result if prepared.again else without_reference_errors(prepared, result)
    other = Findings.merged(probe.findings(prepared, side) for probe in OF_OTHER_INPUTS)
    return replace(result, failures=other.failures, notes=(*other.notes, *result.notes))


def _gradient_problems(prepared: ReferenceSide, result: Result) -> list[str]:
    """Return why failing gradients cannot be compared: no output of the reference has a gradient.

    This is tested only if nothing but gradients fails, since it takes a forward pass. A port
    without a gradient passes too: both are zero.
    """
    failed = {report.kind for report in result.tensors if report.verdict is Verdict.FAIL}
    if result.failures or not failed or any(not kind.startswith("gradient") for kind in failed):
        return []
    return [] if prepared.has_gradient else [_NO_GRADIENT]


_NO_GRADIENT = (
    "reference: expected outputs with a gradient, as the port's have, but requires_grad is False "
    "for all of them: the module or reference_call runs under torch.no_grad() or detaches them. "
    "Remove that, or pass gradients=False to compare only the outputs"
)


def with_coarse_dtype(port: AskedPort, result: Result) -> Result:
    """Return a failing result that names the coarser dtype in which the port computes, if any.

    If that dtype holds for at least half of the operations, it is the first failure, because it
    explains the others; otherwise it is a note, because the reason may lie elsewhere. The dtype of
    the port's outputs does not tell: the last operation may widen them again.
    """
    reasons = (reason for report in result.tensors for reason in report.reasons)
    if result.verdict is not Verdict.FAIL or all(r.kind != "over-budget" for r in reasons):
        return result
    dtypes = port.computed_in()
    coarse = {name: n for name, n in dtypes.items() if not holds(float_dtype(name), result.dtype)}
    if not coarse:
        return result
    most = max(coarse, key=coarse.__getitem__)
    number, total = (sum(counted.values()) for counted in (coarse, dtypes))
    computes = (
        f"the port computes in {most} in {number} of {total} floating-point operations, and is "
        f"checked in {result.dtype}"
    )
    if 2 * number < total:
        return replace(result, notes=(*result.notes, Finding("coarse-port", computes)))
    sentence = f"{computes}; build the module with dtype {result.dtype}; {checked_in(most)}"
    return replace(result, failures=(Finding("coarse-port", sentence), *result.failures))
