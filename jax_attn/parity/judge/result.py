"""The result of a check, one verdict over every tensor; and what a run lists without one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Group
from rich.text import Text

from jax_attn.parity.judge.compare import TensorReport, Verdict, deciding
from jax_attn.parity.judge.text import STYLES, plain, tensor_table, worst_element


class ParityError(AssertionError):
    """A check whose verdict is not PASS; the message is its report."""


class StandingNote(str):
    """A note that holds whatever the inputs are: no input could remove it."""


@dataclass(frozen=True)
class Result:
    """The result of a check.

    tensors: one report for each tensor and transform. failures, doubts: why the whole is not
    PASS, beyond its tensors. notes: what was not compared, and other things to know; those that
    are `StandingNote`s hold whatever the inputs are, and do not count in `strict`.
    level: measured, interpreted or emulated: only measured is parity on `backend`; not run, where
    there is nothing to run and the doubts say why.
    """

    dtype: str
    backend: str
    tensors: tuple[TensorReport, ...]
    failures: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    level: str = "measured"
    name: str = "check"
    details: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        if self.failures:
            return Verdict.FAIL
        worst = Verdict.worst(t.verdict for t in self.tensors)
        return Verdict.INCONCLUSIVE if self.doubts and worst is Verdict.PASS else worst

    @property
    def worst(self) -> TensorReport | None:
        """The tensor that decides; None of none."""
        return deciding(self.tensors)

    def ratio(self, tensor: TensorReport) -> float | None:
        """Ours over torch's own, where both have the same roundoff."""
        return tensor.ratio if self.level == "measured" else None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every reason why the verdict is not PASS."""
        own = [f"{t.transform} {t.label}: {r}" for t in self.tensors for r in t.reasons]
        return (*self.failures, *self.doubts, *own)

    def strict(self) -> "Result":
        """The same result, in which each note is a doubt, except those that are standing."""
        counting = tuple(note for note in self.notes if not isinstance(note, StandingNote))
        standing = tuple(note for note in self.notes if isinstance(note, StandingNote))
        return replace(self, doubts=(*self.doubts, *counting), notes=standing)

    def raise_for_status(self) -> "Result":
        """Itself where the verdict is PASS; else raises ParityError with the report."""
        if self.verdict is not Verdict.PASS:
            raise ParityError(str(self))
        return self

    def __str__(self) -> str:
        return plain(self)

    def __rich__(self) -> Group:
        """The whole report: a line a tensor, then why the verdict is what it is."""
        heading = Text.assemble(
            (str(self.verdict), STYLES[self.verdict]),
            f"  {self.name}  {self.dtype} on {self.backend}, {self.level}",
        )
        lines = [Text(f"- {reason}") for reason in self.reasons]
        worst = self.worst
        if worst is not None and worst.verdict is Verdict.FAIL and not math.isnan(worst.fraction):
            lines.append(Text(worst_element(worst)))
        lines += [Text(f"note: {note}", style="dim") for note in self.notes]
        table = tensor_table(self.tensors, ratios=self.level == "measured")
        return Group(heading, table, *lines) if self.tensors else Group(heading, *lines)

    def as_dict(self) -> dict:
        """Plain data, for JSON; tensors by label, and by transform where there are several."""
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
            "tensors": {
                f"{t.transform} {t.label}" if several else t.label: t.as_dict()
                for t in self.tensors
            },
        }


@dataclass(frozen=True)
class NotRun:
    """What was compiled, lowered or refused but not run, and so has no verdict.

    design: its name; a kernel's is "kernel splash", a refused row's that of its case.
    direction: forward, gradient or both. dtype, shape: of its inputs.
    level: compiled, lowered, failed (to compile or lower), not compiled, refused (by the kernel).
    target: the device or platform. error: why it came no further.
    figures: what the compiler counts: flops, flops_by, temporaries (bytes), seconds, ...
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
        """Plain data, for JSON; what was lowered has an `error` of None, what compiled has none."""
        fields = dict(vars(self))
        error, figures = fields.pop("error"), fields.pop("figures")
        has_error = error is not None or self.level == "lowered"
        return {**fields, **figures, **({"error": error} if has_error else {})}
