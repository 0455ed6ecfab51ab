"""One tensor of the port against the oracle, within its budget: where, how much, why not."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from jax_attn.parity.judge.budget import Budget, projection

# An RMS error of more than this part of the tensor's own RMS would be too much to let pass.
POWER = 0.1
# The port may round twice where the reference rounds once: another kernel, another order.
ROUNDINGS = 2.0


class Verdict(StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"

    @classmethod
    def worst(cls, verdicts: Iterable["Verdict"]) -> "Verdict":
        """FAIL before INCONCLUSIVE before PASS; of none, INCONCLUSIVE: nothing was compared."""
        return max(verdicts, key=_SEVERITY.index, default=cls.INCONCLUSIVE)


_SEVERITY = [Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.FAIL]
_LABELS = {
    "output": "{}",
    "gradient of input": "grad input {}",
    "gradient of parameter": "grad {}",
    "state after the call": "{} after the call",
    "output of the second call": "{} of a second call",
}


@dataclass(frozen=True)
class TensorReport:
    """How one tensor compares. Errors are against the oracle; RMS over finite elements.

    fraction: the largest error over its budget, any gate; 1 is the limit.
    error, reference_error: RMS of the port's and of torch's own; None where torch gave none.
    scale: the oracle's RMS. budget: the RMS error that would still pass.
    index, got, want, allowed: the worst element. projection: its gate's own fraction, NaN of a
    tensor that is zero.
    """

    kind: str
    name: str
    transform: str
    verdict: Verdict
    reasons: tuple[str, ...]
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

    @property
    def label(self) -> str:
        return _LABELS[self.kind].format(self.name)

    @property
    def is_zero(self) -> bool:
        """Whether the oracle is zero everywhere, or only rounding, or it was never compared."""
        return math.isnan(self.projection)

    @property
    def ratio(self) -> float | None:
        """The port's RMS error over torch's own; None where torch made none."""
        return self.error / self.reference_error if self.reference_error else None

    def as_dict(self) -> dict:
        """Plain data, for JSON: what is not a finite number is null."""
        plain = asdict(self) | {"verdict": str(self.verdict), "ratio": self.ratio}
        return {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in plain.items()
        }


def deciding(tensors: Sequence[TensorReport]) -> TensorReport | None:
    """The tensor of the worst verdict, and of those the one with the largest fraction."""

    def rank(tensor: TensorReport) -> tuple[int, float]:
        # A fraction that could not be had (another shape) is worse than any.
        fraction = math.inf if math.isnan(tensor.fraction) else tensor.fraction
        return _SEVERITY.index(tensor.verdict), fraction

    return max(tensors, key=rank, default=None)


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
    """The verdict on `got`, given the oracle `want` and the reference's `own`, all float64.

    own: None where the reference is known to be no guide here (a declared NaN).
    """

    def report(failures: Sequence[str], weak: Sequence[str] = (), **figures: Any) -> TensorReport:
        verdict = Verdict.FAIL if failures else Verdict.INCONCLUSIVE if weak else Verdict.PASS
        return TensorReport(
            kind, name, transform, verdict, (*failures, *weak), want.shape, **figures
        )

    if got.shape != want.shape:
        return report([f"shape: expected {want.shape}, got {got.shape}"])
    finite = np.isfinite(want)
    failures = _finite_elsewhere(got, want, "the port")
    if own is not None:
        failures += _finite_elsewhere(own, want, "the reference")
    if not finite.any():
        return report(failures, ["nothing compared: the oracle is nowhere finite"])
    spread = budget.rms + budget.projection
    if not (np.isfinite(budget.element[finite]).all() and math.isfinite(spread)):
        return report(failures, ["no budget: a perturbed run is not finite where the oracle is"])

    want_f, got_f, allowed_f = want[finite], got[finite], budget.element[finite]
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.abs(got_f - want_f)
    fractions = _over(np.nan_to_num(errors, nan=math.inf, posinf=math.inf), allowed_f)
    worst = int(np.argmax(fractions))
    gates = {"element": float(fractions[worst])}
    own_rms, guide_rms = None, 0.0
    if own is not None:
        own_errors = np.abs(own[finite] - want_f)
        own_rms = guide_rms = rms(own_errors)
        if not failures and (most := float(np.max(_over(own_errors, allowed_f)))) > 1:
            failures += [
                f"the reference itself errs, by {most:.3g} times the budget, whatever the port does"
            ]
            guide_rms = 0.0
    scale, budget_rms = rms(want_f), ROUNDINGS * max(guide_rms, budget.rms)
    is_zero = scale <= budget.zero
    if np.isfinite(got_f).all():
        gates["RMS"] = float(_over(np.array(rms(errors)), np.array(budget_rms)))
        if not is_zero:
            shared = abs(projection(got_f, want_f))
            gates["projection"] = float(_over(np.array(shared), np.array(budget.projection)))
    if over := {gate: fraction for gate, fraction in gates.items() if not fraction <= 1}:
        gates_over = ", ".join(f"{gate} {fraction:.3g}" for gate, fraction in over.items())
        failures.append(f"error over budget: {gates_over} times")
    weak = []
    if not is_zero and budget_rms > POWER * scale:
        weak = [
            f"no power: an RMS error of {budget_rms / scale:.2g} of the tensor's own would pass"
        ]
    return report(
        failures,
        weak,
        fraction=max(gates.values()),
        projection=gates.get("projection", math.nan),
        error=rms(errors),
        reference_error=own_rms,
        scale=scale,
        budget=budget_rms,
        index=tuple(int(i) for i in np.argwhere(finite)[worst]),
        got=float(got_f[worst]),
        want=float(want_f[worst]),
        allowed=float(allowed_f[worst]),
    )


def _over(error: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """error / allowed; nothing over nothing is nothing."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(error == 0, 0.0, error / allowed)


def _finite_elsewhere(got: np.ndarray, want: np.ndarray, side: str) -> list[str]:
    """Where `got` is NaN or infinite otherwise than the oracle is."""
    special = ~np.isfinite(want)
    differ = (~np.isfinite(got) & ~special) | (
        special & ~((np.isnan(got) & np.isnan(want)) | (got == want))
    )
    if not differ.any():
        return []
    first = tuple(int(i) for i in np.argwhere(differ)[0])
    return [
        f"{side} is not finite where the oracle is, or the reverse, at {int(differ.sum())} of "
        f"{differ.size} elements, first {list(first)}: expected {want[first]}, got {got[first]}"
    ]
