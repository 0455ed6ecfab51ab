"""Name the coarser dtype in which a failing port computes, as JAX models do in mixed precision."""

from dataclasses import replace

from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.judge.finding import Finding
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.asked_port import AskedPort, checked_in
from jax_attn.parity.run.inputs_and_runs import float_dtype, holds


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
