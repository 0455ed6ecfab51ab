"""Find whether the reference itself errs by more than rounding allows, so that no port can pass."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload

from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.compare import BESIDE, POWER, ROUNDINGS, TensorReport, Verdict
from jax_attn.parity.judge.finding import Finding, findings
from jax_attn.parity.judge.result import Result
from jax_attn.parity.judge.text import joined
from jax_attn.parity.run.inputs_and_runs import wide
from jax_attn.parity.run.modes.constants import Kwargs
from jax_attn.parity.run.modes.float64_mode import TORCH_DTYPES
from jax_attn.parity.run.modes.lines import calling_line
from jax_attn.parity.run.modes.mode import Mode


def reference_failures(prepared: Prepared) -> tuple[Finding, ...]:
    """Failures of the reference itself: undeclared NaN, or errors in inference mode."""
    failures = []
    for name, declared in prepared.declared_nan.items():
        is_nan = np.isnan(wide(prepared.own.outputs)[name])
        if not np.array_equal(is_nan, declared):
            sentence = (
                f"declared difference: reference {name} should be NaN at {int(declared.sum())} "
                f"elements, as published, and is at {int(is_nan.sum())}"
            )
            failures.append(Finding("other-nan", sentence))
    for name, got in wide(prepared.inference).items():
        if name in prepared.declared_nan:
            got = np.where(prepared.declared_nan[name], prepared.exact.kinds["output"][name], got)
        report = prepared.judge_one("output", name, "inference", got)
        if report.verdict is Verdict.FAIL and name not in prepared.fact(_right_without_nesting):
            told = (f"the reference in inference mode: {name}: {r}" for r in report.reasons)
            failures += findings("inference-errs", told)
    return tuple(failures)


def left_out_in_inference(prepared: Prepared) -> tuple[Finding, ...]:
    """Note that torch's encoder drops padded tokens in inference mode, which a port need not do."""
    encoders = _nested_encoders(prepared.reference.module)
    notes = (
        f"in inference mode `{next(iter(encoders))}` of the reference drops padded tokens, as "
        f"torch's nested tensors do, which changes {name}. The port is compared with the outputs "
        "under grad; to have these in inference mode too, use enable_nested_tensor=False"
        for name in prepared.fact(_right_without_nesting)
    )
    return findings("padding-left-out", notes)


def _right_without_nesting(prepared: Prepared) -> tuple[str, ...]:
    """Return the outputs that inference mode gets wrong only because encoders nest tensors."""
    reference = prepared.reference
    if not _nested_encoders(reference.module):
        return ()

    def plain(module: torch.nn.Module, *args: Any, **inputs: Any) -> Any:
        for encoder in _nested_encoders(module).values():
            encoder.use_nested_tensor = False
        return (reference.call or torch.nn.Module.__call__)(module, *args, **inputs)

    def is_right(name: str, got: np.ndarray) -> bool:
        report = prepared.judge_one("output", name, "inference", got)
        return report.verdict is not Verdict.FAIL

    without = wide(reference.called(plain).outputs(prepared.dtype))
    return tuple(
        name
        for name, got in wide(prepared.inference).items()
        if not is_right(name, got) and is_right(name, without[name])
    )


def _nested_encoders(module: torch.nn.Module) -> dict[str, torch.nn.TransformerEncoder]:
    return {
        name or type(part).__name__: part
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.TransformerEncoder) and part.use_nested_tensor
    }


def without_reference_errors(prepared: Prepared, result: Result) -> Result:
    """Return the result, INCONCLUSIVE instead of FAIL if only the reference itself fails.

    It never becomes PASS, because a doubt says what the reference does.
    """
    inference = prepared.fact(reference_failures)
    tensors = tuple(_of_port(prepared, report) for report in result.tensors)
    if tensors == result.tensors and not inference:
        return result
    return replace(
        result,
        tensors=tensors,
        failures=tuple(failure for failure in result.failures if failure not in inference),
        doubts=(*result.doubts, prepared.fact(reference_errs), *inference),
    )


def _of_port(prepared: Prepared, report: TensorReport) -> TensorReport:
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


def reference_errs(prepared: Prepared) -> Finding:
    """Say that the reference itself errs, and where it casts to a coarser dtype."""
    dtype = prepared.dtype
    narrowing = _Narrowing(TORCH_DTYPES[dtype])
    with narrowing:
        prepared.reference.run(dtype, {})
    errs = f"the reference itself errs by more than rounding in {dtype}, whatever the port does"
    if not narrowing.casts:
        return Finding(
            "reference-errs",
            f"{errs}; to judge the port, use inputs on which torch is accurate, or another "
            "kernel of torch for the same function",
        )
    return Finding(
        "reference-errs",
        f"{errs}: it casts {joined(list(narrowing.casts)[:3])} (torch.autocast does so, too); to "
        "judge the port, use a reference without such casts",
    )


class _Narrowing(Mode):
    """Recorder of casts of floating-point numbers to a coarser dtype than the one under test."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._eps = torch.finfo(dtype).eps
        self.casts: dict[str, None] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: Kwargs | None = None
    ) -> Any:
        to = (kwargs or {}).get("dtype")
        is_cast = func.overloadpacket.__name__ == "_to_copy" and args[0].is_floating_point()
        if is_cast and to and to.is_floating_point and torch.finfo(to).eps > self._eps:
            self.casts[f"to {str(to).removeprefix('torch.')} at {calling_line()}"] = None
        return func(*args, **(kwargs or {}))
