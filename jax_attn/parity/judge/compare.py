"""Compare one tensor of the port with the oracle, within a budget, and report every difference."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from jax_attn.parity.judge.budget import Budget
from jax_attn.parity.judge.figures import ErrorMap, SideErrors, figures, maps, over
from jax_attn.parity.judge.finding import Finding

# A budget above this fraction of the tensor's own RMS is too large to show an error.
POWER = 0.1
# The port may round twice as often as the reference, in another kernel or another order.
ROUNDINGS = 2.0


BESIDE = ", beside one device"
"""Suffix of the transform in reports that compare a run on a mesh with one on a single device."""
PLANTED = "planted"
"""Transform in reports on a run with a planted bug. They have no heat maps: nobody reads those, and
for a long tensor they take longer than the verdict."""


class Verdict(StrEnum):
    """The outcome of a comparison.

    - PASS: every error is within its budget, and a planted bug would have been detected.
    - FAIL: some error is beyond its budget.
    - INCONCLUSIVE: neither was shown; the reasons say what would show it.
    """

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"

    @classmethod
    def worst(cls, verdicts: Iterable["Verdict"]) -> "Verdict":
        """Return the worst of several verdicts: FAIL, then INCONCLUSIVE, then PASS.

        Without any verdict, the result is INCONCLUSIVE, since nothing was compared.
        """
        return max(verdicts, key=_SEVERITY.index, default=cls.INCONCLUSIVE)


_SEVERITY = [Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.FAIL]
_LABELS = {
    "output": "{}",
    "gradient of input": "grad input {}",
    "gradient of parameter": "grad {}",
    "parameter after a step": "{} after a step",
    "state after the call": "{} after the call",
    "output of the second call": "{} of a second call",
}


@dataclass(frozen=True)
class TensorReport:
    """Per-tensor verdict with its statistics.

    Errors are measured against the oracle, and RMS is taken over its finite elements.
    fraction: the largest error over its budget among all gates; 1 is the limit.
    error, reference_error: RMS error of the port and of torch; None if torch gave no tensor.
    scale: the oracle's RMS. budget: the largest RMS error that passes.
    index, got, want, allowed: the worst element. projection: the fraction of the projection gate,
    NaN if the tensor is zero. heat: maps of the error, if the tensor fails.
    """

    kind: str
    name: str
    transform: str
    verdict: Verdict
    reasons: tuple[Finding, ...]
    shape: tuple[int, ...]
    fraction: float = math.nan
    error: float = math.nan
    reference_error: float | None = None
    scale: float = math.nan
    budget: float = math.nan
    index: tuple[int, ...] = ()
    got: float = math.nan
    want: float = math.nan
    allowed: float = math.nan
    projection: float = math.nan
    heat: tuple[ErrorMap, ...] = field(default=(), repr=False)

    @property
    def label(self) -> str:
        return _LABELS[self.kind].format(self.name)

    @property
    def is_zero(self) -> bool:
        """True if the oracle is zero up to rounding, or if the tensor was never compared."""
        return math.isnan(self.projection)

    @property
    def ratio(self) -> float | None:
        """The port's RMS error over torch's own; None if torch's error is zero or unknown."""
        return self.error / self.reference_error if self.reference_error else None

    def as_dict(self) -> dict:
        """Return plain data for JSON, without the maps; null stands for numbers not finite."""
        plain = asdict(self) | {"verdict": str(self.verdict), "ratio": self.ratio}
        del plain["heat"]
        return {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in plain.items()
        }


def worst_first(tensors: Iterable[TensorReport]) -> list[TensorReport]:
    """Sort by verdict, then by the error over its budget, the worst first."""

    def rank(tensor: TensorReport) -> tuple[int, float]:
        # A missing fraction (another shape) is worse than any other.
        fraction = math.inf if math.isnan(tensor.fraction) else tensor.fraction
        return _SEVERITY.index(tensor.verdict), fraction

    return sorted(tensors, key=rank, reverse=True)


def deciding(tensors: Iterable[TensorReport]) -> TensorReport | None:
    """Return the tensor of the worst verdict with the largest fraction; None without tensors."""
    return next(iter(worst_first(tensors)), None)


def rms(a: np.ndarray) -> float:
    return math.sqrt(np.mean(np.square(a))) if a.size else 0.0


def judge(
    want: np.ndarray,
    got: np.ndarray,
    own: np.ndarray | None,
    budget: Budget,
    *,
    kind: str,
    name: str,
    transform: str,
) -> TensorReport:
    """Judge `got`, given the oracle `want` and the reference's `own`, all float64.

    own: None if the reference is known to be wrong here, as for a declared NaN.
    """

    def report(
        failures: Sequence[Finding], weak: Sequence[Finding] = (), **fields: Any
    ) -> TensorReport:
        verdict = Verdict.FAIL if failures else Verdict.INCONCLUSIVE if weak else Verdict.PASS
        return TensorReport(
            kind, name, transform, verdict, (*failures, *weak), want.shape, **fields
        )

    if got.shape != want.shape:
        shapes = f"shape: expected {want.shape}, got {got.shape}"
        return report([Finding("other-shape", shapes)])
    found = figures(want, got, own, budget.element)
    failures = _elsewhere("not-finite", found.port, got, want, "the port")
    if own is not None and found.own is not None:
        failures += _elsewhere("reference-not-finite", found.own, own, want, "the reference")
    if not found.count:
        nowhere = "nothing compared: no element of the oracle is finite"
        return report(failures, [Finding("nothing-finite", nowhere)])
    if not (found.has_budget and math.isfinite(budget.rms + budget.projection)):
        unbounded = "no budget: a perturbed run is not finite at elements where the oracle is"
        return report(failures, [Finding("no-budget", unbounded)])

    port = found.port
    gates = {"element": port.fraction}
    own_rms, guide_rms = None, 0.0
    if found.own is not None:
        own_rms = guide_rms = found.own.rms(found.count)
        if not failures and (most := found.own.fraction) > 1:
            errs = f"by {most:.3g} times the budget, so no port can pass"
            failures += [Finding("reference-errs", f"the reference itself errs {errs}")]
            guide_rms = 0.0
    scale = math.sqrt(found.norm / found.count)
    budget_rms = ROUNDINGS * max(guide_rms, budget.rms)
    is_zero = scale <= budget.zero
    if port.all_finite:
        gates["RMS"] = _over(port.rms(found.count), budget_rms)
        if not is_zero:
            shared = abs(port.shared) / found.norm if found.norm > 0 else 0.0
            gates["projection"] = _over(shared, budget.projection)
    if beyond := {gate: fraction for gate, fraction in gates.items() if not fraction <= 1}:
        times = ", ".join(f"{gate} {fraction:.3g} times" for gate, fraction in beyond.items())
        failures.append(Finding("over-budget", f"error over budget: {times}"))
    weak = []
    if not is_zero and budget_rms > POWER * scale:
        passing = f"an RMS error of {budget_rms / scale:.2g} times the tensor's RMS would pass"
        weak = [Finding("no-power", f"no power: {passing}")]
    index = np.unravel_index(port.worst, want.shape)
    return report(
        failures,
        weak,
        fraction=max(gates.values()),
        projection=gates.get("projection", math.nan),
        error=port.rms(found.count),
        reference_error=own_rms,
        scale=scale,
        budget=budget_rms,
        index=tuple(int(i) for i in index),
        got=float(got[index]),
        want=float(want[index]),
        allowed=float(budget.element[index]),
        heat=maps(want, got, budget.element) if failures and transform != PLANTED else (),
    )


def _over(error: float, allowed: float) -> float:
    return float(over(np.array(error), np.array(allowed)))


def _elsewhere(
    kind: str, errors: SideErrors, got: np.ndarray, want: np.ndarray, side: str
) -> list[Finding]:
    """Return a finding if `got` and the oracle are not finite at different elements, else none."""
    if not errors.undefined.count:
        return []
    first = np.unravel_index(errors.undefined.first, want.shape)
    sentence = (
        f"{side} is not finite where the oracle is, or the reverse, at {errors.undefined.count} of "
        f"{want.size} elements, first {[int(i) for i in first]}: expected {want[first]}, "
        f"got {got[first]}"
    )
    return [Finding(kind, sentence)]
