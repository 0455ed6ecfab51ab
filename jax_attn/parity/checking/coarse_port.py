"""Name the coarser dtype in which a failing port computes, as JAX models do in mixed precision."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
from jax.extend import core as jex

from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.judge.finding import Finding
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.inputs_and_runs import is_float
from jax_attn.parity.run.port import Port, checked_in, holds


def with_coarse_dtype(port: Port, result: Result) -> Result:
    """Return a result whose failure names the coarser dtype in which the port computes, if any.

    The dtype of its outputs does not tell: the last operation may widen them again.
    """
    reasons = (reason for report in result.tensors for reason in report.reasons)
    if result.verdict is not Verdict.FAIL or all(r.kind != "over-budget" for r in reasons):
        return result
    forward, *args = port.bind()
    with port.on_mesh():
        dtypes = Counter(_float_dtypes(jax.make_jaxpr(forward)(*args).jaxpr))
    coarse = {dtype: n for dtype, n in dtypes.items() if not holds(dtype, result.dtype)}
    if not coarse:
        return result
    most = max(coarse, key=coarse.__getitem__).name
    sentence = (
        f"the port computes in {most} in {sum(coarse.values())} of {dtypes.total()} floating-point "
        f"operations, and is checked in {result.dtype}; build the module with dtype {result.dtype}"
        f"; {checked_in(most)}"
    )
    return replace(result, failures=(Finding("coarse-port", sentence), *result.failures))


def _float_dtypes(jaxpr: jex.Jaxpr) -> Iterator[np.dtype]:
    """Yield the dtype of each floating-point result of the innermost operations."""
    for equation in jaxpr.eqns:
        if inside := list(jex.jaxprs_in_params(equation.params)):
            for each in inside:
                yield from _float_dtypes(each)
        else:
            dtypes = (getattr(v.aval, "dtype", None) for v in equation.outvars)
            yield from (d for d in dtypes if isinstance(d, np.dtype) and is_float(d))
