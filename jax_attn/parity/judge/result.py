"""The result of a check, with one verdict over all tensors; and entries that have no verdict."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group
from rich.text import Text

from jax_attn.parity.judge.compare import TensorReport, Verdict, deciding, worst_first
from jax_attn.parity.judge.finding import Finding, StandingNote
from jax_attn.parity.judge.text import (
    STYLES,
    Hanging,
    joined,
    number,
    plain,
    tensor_table,
    worst_element,
)

if TYPE_CHECKING:
    from jax_attn.parity.explaining.explanation import Explanation

SHOWN = 10
"""The number of tensors that a report lists unless it is asked for all."""


class ParityError(AssertionError):
    """Raised for a check whose verdict is not PASS; the message is its report."""


class WeightedFinding(NamedTuple):
    """A finding of a result, as programs read it.

    Attributes:
      weight: "failure" (a reason for FAIL), "doubt" (for INCONCLUSIVE), "note" or "standing note".
      kind: a word of `KINDS`, which stays the same when sentences are reworded.
      sentence: the finding in words.
    """

    weight: str
    kind: str
    sentence: str


@dataclass(frozen=True)
class Result:
    """The result of a check.

    Attributes:
      dtype: the dtype of the modules.
      backend: the platform that the port ran on.
      tensors: one report for each tensor and transform.
      failures: reasons for FAIL beyond those of the tensors.
      doubts: reasons for INCONCLUSIVE beyond those of the tensors.
      notes: what was not compared, and what else a reader should know. A `StandingNote` holds
        whatever the inputs are, and `strict` does not count it. Each of the three is a `Finding`: a
        string with a `kind`.
      level: measured, interpreted, emulated or not run. Only "measured" is parity on `backend`.
        "not run" means that there was nothing to run; the doubts say why.
      name: the name of the check.
      details: further facts for reports, such as the number of steps.
      explanation: the explanation that `explained` adds, as plain data; otherwise None.
      explainer: the function that `explain` calls; None unless the result comes from `check` or
        `check_training`.
    """

    dtype: str
    backend: str
    tensors: tuple[TensorReport, ...]
    failures: tuple[Finding, ...] = ()
    doubts: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()
    level: str = "measured"
    name: str = "check"
    details: dict[str, str] = field(default_factory=dict)
    explanation: dict[str, Any] | None = None
    explainer: Callable[["Result"], "Explanation"] | None = field(
        default=None, repr=False, compare=False
    )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle: all but `explainer`, which holds both modules."""
        return {**vars(self), "explainer": None}

    @property
    def verdict(self) -> Verdict:
        """PASS, FAIL or INCONCLUSIVE, over all tensors."""
        if self.failures:
            return Verdict.FAIL
        worst = Verdict.worst(t.verdict for t in self.tensors)
        return Verdict.INCONCLUSIVE if self.doubts and worst is Verdict.PASS else worst

    @property
    def worst(self) -> TensorReport | None:
        """The tensor that decides the verdict; None if no tensor was compared."""
        return deciding(self.tensors)

    def ratio(self, tensor: TensorReport) -> float | None:
        """Return our error divided by torch's; None unless both have the same roundoff."""
        return tensor.ratio if self.level == "measured" else None

    @property
    def reasons(self) -> tuple[Finding, ...]:
        """Every reason why the verdict is not PASS, those for FAIL first."""
        return self._reasons_of(self.tensors)

    def _reasons_of(self, tensors: Sequence[TensorReport]) -> tuple[Finding, ...]:
        failed = [t for t in tensors if t.verdict is Verdict.FAIL]
        weak = [t for t in tensors if t.verdict is not Verdict.FAIL]
        return (*self.failures, *_reasons(failed), *self.doubts, *_reasons(weak))

    @property
    def findings(self) -> tuple[WeightedFinding, ...]:
        """Every reason and every note, with its kind and its weight.

        A reason of a tensor is a failure if the tensor fails, else a doubt.
        """
        failed = _reasons(t for t in self.tensors if t.verdict is Verdict.FAIL)
        weak = _reasons(t for t in self.tensors if t.verdict is not Verdict.FAIL)
        notes = [note for note in self.notes if not isinstance(note, StandingNote)]
        standing = [note for note in self.notes if isinstance(note, StandingNote)]
        listed: dict[str, Iterable[Finding]] = {
            "failure": (*self.failures, *failed),
            "doubt": (*self.doubts, *weak),
            "note": notes,
            "standing note": standing,
        }
        return tuple(
            WeightedFinding(weight, finding.kind, str(finding))
            for weight, weighted in listed.items()
            for finding in weighted
        )

    @property
    def gist(self) -> str:
        """The deciding tensor and its error over its budget, or else the first reason."""
        tensor = self.worst
        if tensor is None or tensor.verdict is not self.verdict or self.verdict is Verdict.PASS:
            return next(iter(self.reasons), "nothing differs")
        share = "" if math.isnan(tensor.fraction) else f", {number(tensor.fraction)} of its budget"
        return f"{tensor.transform} {tensor.label}{share}"

    def strict(self) -> "Result":
        """Return the same result with each note as a doubt, except standing notes."""
        counting = tuple(note for note in self.notes if not isinstance(note, StandingNote))
        standing = tuple(note for note in self.notes if isinstance(note, StandingNote))
        return replace(self, doubts=(*self.doubts, *counting), notes=standing)

    def explain(self) -> "Explanation":
        """Return where the port first differs from its reference, and what would explain it.

        This equals `parity.explain`, without running the check again. If the updates of a training
        are wrong, the explanation says under which recipe the reference makes the port's updates.

        Raises:
          ValueError: this result does not hold its two modules, because it was pickled, comes from
            a golden reference without taps, or not from `check` or `check_training`. The message
            says what to call.
        """
        if self.explainer is None:
            raise ValueError(
                f"explain: expected a result that holds its two modules, got {self.name!r}, which "
                "does not: it was pickled, explained already, judged by a golden reference without "
                "taps, or not made by parity.check; where the reference is, call "
                "parity.explain(reference, port, inputs, …) with the arguments of the check, or "
                "parity.check_training(…).explain()"
            )
        return self.explainer(self)

    def explained(self) -> "Result":
        """Return the same result with its explanation, and without the two modules.

        `explanation` is None if the verdict is PASS.
        """
        if self.verdict is Verdict.PASS or self.explainer is None:
            return replace(self, explainer=None)
        found = self.explain()
        data = {**found.to_json(), "text": found.text}
        return replace(self, explainer=None, explanation=data)

    def raise_for_status(self, *, all_tensors: bool = False) -> "Result":
        """Return the result if its verdict is PASS; otherwise raise ParityError with the report.

        Args:
          all_tensors: as for `report`.
        """
        if self.verdict is not Verdict.PASS:
            raise ParityError(plain(self.report(all_tensors=all_tensors)))
        return self

    def __str__(self) -> str:
        return plain(self)

    def __rich__(self) -> "Report":
        return self.report()

    def report(self, *, all_tensors: bool = False) -> "Report":
        """Return the report: the explanation, the reasons, a line for each tensor, and the notes.

        `print` shows it as text, and rich in color. `str(result)` is the same report.

        Args:
          all_tensors: whether to list every tensor, and not only the ten worst and their reasons.
        """
        heading = Text.assemble(
            (str(self.verdict), STYLES[self.verdict]),
            f"  {self.name}  {self.dtype} on {self.backend}, {self.level}",
        )
        shown, left_out = list(self.tensors), []
        if len(shown) > SHOWN and not all_tensors:
            shown, left_out = (ranked := worst_first(shown))[:SHOWN], ranked[SHOWN:]
        lines = [Hanging(Text(f"- {reason}")) for reason in self._reasons_of(shown)]
        worst = self.worst
        if worst is not None and worst.verdict is Verdict.FAIL and not math.isnan(worst.fraction):
            lines.append(Hanging(Text(worst_element(worst))))
        table = tensor_table(shown, ratios=self.level == "measured")
        notes = [Hanging(Text(f"note: {note}", style="dim")) for note in self.notes]
        more = [Text(_left_out(left_out))] if left_out else []
        said = self.explanation["text"].splitlines() if self.explanation else []
        found = [Hanging(Text(line)) for line in (["explained:", *said] if said else [])]
        return Report(heading, *found, *lines, *([table] if shown else []), *more, *notes)

    def as_dict(self) -> dict:
        """Return plain data for JSON; if there are several transforms, they prefix tensor names."""
        several = len({t.transform for t in self.tensors}) > 1
        return {
            "name": self.name,
            **self.details,
            "dtype": self.dtype,
            "backend": self.backend,
            "level": self.level,
            "verdict": str(self.verdict),
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "findings": [finding._asdict() for finding in self.findings],
            **({"explanation": self.explanation} if self.explanation else {}),
            "tensors": {
                f"{t.transform} {t.label}" if several else t.label: t.as_dict()
                for t in self.tensors
            },
        }


class Report(Group):
    """The report of a result, for rich to print; `str` gives the same as text."""

    def __str__(self) -> str:
        return plain(self)


def _reasons(tensors: Iterable[TensorReport]) -> Iterator[Finding]:
    """Return the reasons why each tensor is not PASS, with its transform and label."""
    return (r.after(f"{t.transform} {t.label}: ") for t in tensors for r in t.reasons)


def _left_out(tensors: Sequence[TensorReport]) -> str:
    """Count the verdicts of the tensors that a report does not list, in a sentence."""
    count = Counter(t.verdict for t in tensors)
    each = [v.lower() if len(count) == 1 else f"{n} {v.lower()}" for v, n in count.items()]
    how = "--all-tensors, or report(all_tensors=True), shows them"
    return f"… and {len(tensors)} more: {joined(each)}; {how}"


@dataclass(frozen=True)
class NotRun:
    """A program that was compiled, lowered or refused but not run, and so has no verdict.

    design: its name; for a kernel, such as "kernel splash", followed by its mesh if it is sharded;
    for a refused row, the name of its case.
    direction: forward, gradient or both. dtype, shape: those of its inputs.
    level: compiled, lowered, failed (to compile or lower), not compiled, refused (by the kernel).
    target: the device or platform. error: the reason why it got no further.
    figures: the compiler's figures: flops, flops_by, temporaries (bytes), seconds, ...
    """

    design: str
    direction: str
    dtype: str
    shape: str
    level: str
    target: str
    error: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; `error` is None if it was lowered, absent if compiled."""
        fields = dict(vars(self))
        error, figures = fields.pop("error"), fields.pop("figures")
        has_error = error is not None or self.level == "lowered"
        return {**fields, **figures, **({"error": error} if has_error else {})}
