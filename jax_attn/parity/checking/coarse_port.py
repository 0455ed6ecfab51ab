"""Name the coarser dtype in which a failing port computes, as JAX models do in mixed precision."""

from dataclasses import replace

from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.judge.finding import Finding
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.asked_port import AskedPort, checked_in
from jax_attn.parity.run.inputs_and_runs import float_dtype, holds


def with_coarse_dtype(port: AskedPort, result: Result) -> Result:
    """Return a result whose failure names the coarser dtype in which the port computes, if any.

    The dtype of its outputs does not tell: the last operation may widen them again.
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
    sentence = (
        f"the port computes in {most} in {number} of {total} floating-point operations, and is "
        f"checked in {result.dtype}; build the module with dtype {result.dtype}; {checked_in(most)}"
    )
    return replace(result, failures=(Finding("coarse-port", sentence), *result.failures))
