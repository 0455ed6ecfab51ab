"""Find whether the reference itself errs by more than rounding allows, so that no port can pass."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from jax_attn.parity.checking.reference_side import ReferenceSide
from jax_attn.parity.judge.compare import BESIDE, POWER, ROUNDINGS, TensorReport, Verdict
from jax_attn.parity.judge.finding import Finding, findings
from jax_attn.parity.judge.result import Result
from jax_attn.parity.judge.text import joined
from jax_attn.parity.run.inputs_and_runs import wide


def reference_failures(prepared: ReferenceSide) -> tuple[Finding, ...]:
    """Return failures of the reference itself: undeclared NaN, or errors in inference mode."""
    failures = []
    for name, declared in prepared.declared_nan.items():
        is_nan = np.isnan(wide(prepared.own.outputs)[name])
        if not np.array_equal(is_nan, declared):
            sentence = (
                f"declared difference: reference {name} should be NaN at {int(declared.sum())} "
                f"elements, as published, and is at {int(is_nan.sum())}"
            )
            failures.append(Finding("other-nan", sentence))
    for name, report in prepared.inference_reports.items():
        if report.verdict is Verdict.FAIL and name not in _right_without_nesting(prepared):
            told = (f"the reference in inference mode: {name}: {r}" for r in report.reasons)
            failures += findings("inference-errs", told)
    return tuple(failures)


def left_out_in_inference(prepared: ReferenceSide) -> tuple[Finding, ...]:
    """Note that torch's encoder drops padded tokens in inference mode, which a port need not do."""
    notes = (
        f"in inference mode `{prepared.nested_encoder}` of the reference drops padded tokens, as "
        f"torch's nested tensors do, which changes {name}. The port is compared with the outputs "
        "under grad; to have these in inference mode too, use enable_nested_tensor=False"
        for name in _right_without_nesting(prepared)
    )
    return findings("padding-left-out", notes)


def _right_without_nesting(prepared: ReferenceSide) -> Iterator[str]:
    """Yield the outputs that inference mode gets wrong only because encoders nest tensors."""
    for name, without in wide(prepared.unnested).items():
        if prepared.inference_reports[name].verdict is Verdict.FAIL:
            report = prepared.judge_one("output", name, "inference", without)
            if report.verdict is not Verdict.FAIL:
                yield name


def without_reference_errors(prepared: ReferenceSide, result: Result) -> Result:
    """Return the result, INCONCLUSIVE instead of FAIL if only the reference itself fails.

    It never becomes PASS, because a doubt says what the reference does.
    """
    inference = reference_failures(prepared)
    tensors = tuple(_of_port(prepared, report) for report in result.tensors)
    if tensors == result.tensors and not inference:
        return result
    return replace(
        result,
        tensors=tensors,
        failures=tuple(failure for failure in result.failures if failure not in inference),
        doubts=(*result.doubts, _errs(prepared), *inference),
    )


def _of_port(prepared: ReferenceSide, report: TensorReport) -> TensorReport:
    """Return the report, INCONCLUSIVE if the oracle's own numbers would FAIL, too.

    It stays FAIL if the port is not finite, or if its error is both larger than POWER times the
    tensor's scale and beyond that of the reference.
    """
    want = prepared.exact.kinds[report.kind].get(report.name)
    if report.transform.endswith(BESIDE):
        return report  # this comparison does not involve the reference
    if report.verdict is not Verdict.FAIL or want is None or not math.isfinite(report.fraction):
        return report
    reached = max(ROUNDINGS * (report.reference_error or 0.0), POWER * report.scale)
    is_far = report.error > reached and not report.is_zero
    best = prepared.judge_one(report.kind, report.name, report.transform, want)
    if is_far or best.verdict is not Verdict.FAIL:
        return report
    return replace(report, verdict=Verdict.INCONCLUSIVE)


def _errs(prepared: ReferenceSide) -> Finding:
    """Say that the reference itself errs, and where it casts to a coarser dtype."""
    dtype, casts = prepared.dtype, prepared.narrowing_casts
    errs = f"the reference itself errs by more than rounding in {dtype}, whatever the port does"
    if not casts:
        return Finding(
            "reference-errs",
            f"{errs}; to judge the port, use inputs on which torch is accurate, or another "
            "kernel of torch for the same function",
        )
    return Finding(
        "reference-errs",
        f"{errs}: it casts {joined(casts[:3])} (torch.autocast does so, too); to "
        "judge the port, use a reference without such casts",
    )
