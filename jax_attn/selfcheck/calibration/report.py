"""Report calibration: how much of their budgets correct configurations use.

Imports neither framework: it renders the results of trials.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from jax_attn.parity.judge.compare import TensorReport, Verdict
from jax_attn.parity.judge.result import Result
from jax_attn.parity.judge.text import SCHEMA_VERSION, finite, number
from jax_attn.selfcheck.calibration.configurations import Configuration

GATES = ("element", "RMS", "projection")
QUANTILES = {"median": 0.5, "90%": 0.9, "99%": 0.99, "largest": 1.0}
WITHOUT_CAUSE = "reasons, and pass without the cause"
DOUBTED = 0.1
"""The largest part of correct configurations that may be INCONCLUSIVE."""


@dataclass(frozen=True)
class PortTrial:
    """The trial of one correct configuration.

    gates: by gate, the largest fraction of its budget that any tensor uses. doubts: the reasons of
    an INCONCLUSIVE, without figures, by tensor. reasons: those of a FAIL, in full. planted: bug ->
    whether it was killed, if bugs were planted. seconds: all that it took. without_cause: for an
    INCONCLUSIVE, the verdict once the cause in its reasons is removed.
    """

    name: str
    number: int
    kind: str
    precision: str
    verdict: Verdict
    gates: dict[str, float]
    traits: dict[str, str]
    doubts: tuple[str, ...]
    reasons: tuple[str, ...]
    planted: dict[str, bool]
    seconds: float
    without_cause: Verdict | None = None

    @classmethod
    def of(
        cls, configuration: Configuration, traits: dict[str, str], result: Result, **others: Any
    ) -> "PortTrial":
        parts = [part for tensor in result.tensors for part in fractions(tensor).items()]
        verdict, tensors = result.verdict, result.tensors
        return cls(
            name=configuration.name,
            number=configuration.number,
            kind=configuration.program.kind,
            precision=configuration.program.precision,
            verdict=verdict,
            gates={g: max((f for gate, f in parts if gate == g), default=0.0) for g in GATES},
            traits=traits,
            doubts=tuple(
                f"{reason.partition(':')[0]}: {t.label}"
                for t in tensors
                for reason in t.reasons
                if verdict is Verdict.INCONCLUSIVE
            ),
            reasons=result.reasons if verdict is Verdict.FAIL else (),
            **others,
        )


def fractions(tensor: TensorReport) -> dict[str, float]:
    """Return gate -> error over budget, for the gates that the tensor has."""

    def over(error: float, budget: float) -> float:
        if not error:
            return 0.0
        return error / budget if budget else math.inf

    by_gate = {
        "element": over(abs(tensor.got - tensor.want), tensor.allowed),
        "RMS": over(tensor.error, tensor.budget),
        "projection": tensor.projection,
    }
    return {gate: f for gate, f in by_gate.items() if not math.isnan(f)}


# --- figures --------------------------------------------------------------------------------------


def groups(trials: Sequence[PortTrial]) -> dict[str, list[PortTrial]]:
    """Group by precision and kind, in order of occurrence; the last group has all trials."""
    by_group: dict[str, list[PortTrial]] = {}
    for trial in trials:
        by_group.setdefault(f"{trial.precision} {trial.kind}", []).append(trial)
    return by_group | {"all": list(trials)}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the `QUANTILES`, each a value that occurs."""
    ordered = sorted(values)
    return {
        name: ordered[max(0, math.ceil(part * len(ordered)) - 1)]
        for name, part in QUANTILES.items()
    }


def figures(trials: Sequence[PortTrial]) -> dict[str, Any]:
    """Return counts of verdicts and, by gate, quantiles of the fractions of budget used."""
    count = Counter(trial.verdict for trial in trials)
    return {
        "configurations": len(trials),
        "pass": count[Verdict.PASS],
        "inconclusive": count[Verdict.INCONCLUSIVE],
        "fail": count[Verdict.FAIL],
        "fractions": {gate: quantiles([t.gates[gate] for t in trials]) for gate in GATES},
    }


def doubts(trials: Sequence[PortTrial]) -> dict[str, dict[str, int]]:
    """Count the INCONCLUSIVE trials by reason, by tensor, and by the drawn values and mask.

    A second count by reason has only those that pass without the cause.
    """
    doubted = [t for t in trials if t.verdict is Verdict.INCONCLUSIVE]
    borne_out = [t for t in doubted if t.without_cause is Verdict.PASS]
    drawn = ("values", "mask")
    return {
        "reasons": _counted({d.partition(": ")[0] for d in t.doubts} for t in doubted),
        WITHOUT_CAUSE: _counted({d.partition(": ")[0] for d in t.doubts} for t in borne_out),
        "tensors": _counted({d.partition(": ")[2] for d in t.doubts} for t in doubted),
        **{name: _counted({t.traits[name]} for t in doubted) for name in drawn},
    }


def _counted(sets: Iterable[set[str]]) -> dict[str, int]:
    return dict(Counter(item for each in sets for item in each).most_common())


def power(trials: Sequence[PortTrial]) -> dict[str, dict[str, int]]:
    """Return "bug, precision" -> counts of configurations that have the bug, and that kill it."""
    counts: dict[str, dict[str, int]] = {}
    for trial in trials:
        for bug, killed in trial.planted.items():
            row = counts.setdefault(f"{bug}, {trial.precision}", {"tried": 0, "killed": 0})
            row["tried"] += 1
            row["killed"] += killed
    return dict(sorted(counts.items()))


def verdict(trials: Sequence[PortTrial]) -> Verdict:
    """Return FAIL if any trial fails, INCONCLUSIVE if too many of them are, else PASS.

    Too many are more than `DOUBTED` of all, or any that still is INCONCLUSIVE without its cause.
    """
    verdicts = [t.verdict for t in trials]
    again = [t.without_cause for t in trials if t.without_cause]
    if Verdict.FAIL in (*verdicts, *again):
        return Verdict.FAIL
    doubted = verdicts.count(Verdict.INCONCLUSIVE) > DOUBTED * len(trials)
    return Verdict.INCONCLUSIVE if doubted or Verdict.INCONCLUSIVE in again else Verdict.PASS


# --- text and JSON --------------------------------------------------------------------------------


def table(trials: Sequence[PortTrial]) -> Table:
    """Build a table of precisions and kinds: verdicts, and each gate's fractions of budget."""
    rendered = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    rendered.add_column("precision, kind", no_wrap=True)
    for title in ("drawn", "PASS", "INCON-\nCLUSIVE", "FAIL"):
        rendered.add_column(title, justify="right", no_wrap=True)
    for gate in GATES:  # in a narrow terminal these wrap; verdicts do not
        rendered.add_column(gate, justify="right")
    for name, chosen in groups(trials).items():
        counts = figures(chosen)
        cells = (counts[k] for k in ("configurations", "pass", "inconclusive", "fail"))
        parts = (counts["fractions"][gate].values() for gate in GATES)
        met = (" ".join(f"{fraction:.2f}" for fraction in each) for each in parts)
        rendered.add_row(name, *map(str, cells), *met)
    return rendered


def power_table(trials: Sequence[PortTrial]) -> Table:
    """Build a table of bugs: by precision, how many of the configurations with a bug kill it."""
    counts = power(trials)
    bugs = list(dict.fromkeys(row.partition(", ")[0] for row in counts))
    precisions = list(dict.fromkeys(row.partition(", ")[2] for row in counts))
    rendered = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rendered.add_column("planted bug", no_wrap=True)
    for precision in precisions:
        rendered.add_column(precision, justify="right", no_wrap=True)
    for bug in bugs:
        cells = (counts.get(f"{bug}, {p}", {"killed": 0, "tried": 0}) for p in precisions)
        rendered.add_row(bug, *(f"{cell['killed']}/{cell['tried']}" for cell in cells))
    return rendered


def summary_lines(trials: Sequence[PortTrial], seed: int) -> list[str]:
    """Return the outcome in words. Every FAIL has its name, with which it can be run again."""
    counts = figures(trials)
    total, unsure = counts["configurations"], counts["inconclusive"]
    largest = ", ".join(f"{g} {number(q['largest'], 2)}" for g, q in counts["fractions"].items())
    lines = [
        f"{total} correct configurations of seed {seed}: {counts['pass']} pass, {unsure} "
        f"inconclusive ({unsure / total:.1%}), {counts['fail']} fail",
        f"largest fraction of budget used: {largest}; the table has the {', '.join(QUANTILES)}",
    ]
    for what, each in doubts(trials).items():
        if each:
            listed = ", ".join(f"{name} {count}" for name, count in each.items())
            lines.append(f"inconclusive, by {what}: {listed}")
    for trial in trials:
        if trial.without_cause not in (None, Verdict.PASS):
            lines.append(
                f"INCONCLUSIVE {trial.name} of seed {seed} ({', '.join(trial.doubts)}): "
                f"{trial.without_cause} without the cause"
            )
        if trial.verdict is Verdict.FAIL:
            traits = ", ".join(f"{k} {v}" for k, v in trial.traits.items())
            lines.append(f"FAIL {trial.name} of seed {seed} ({traits}):")
            lines += [f"  {reason}" for reason in trial.reasons]
    return lines


COLUMNS = ("name", "verdict", *GATES, "seconds")


def as_json(trials: Sequence[PortTrial], seed: int, environment: dict[str, Any]) -> str:
    """Return JSON of figures, a line for each configuration, and in full those that do not pass.

    Infinite numbers become null.
    """
    document = {
        "schema_version": SCHEMA_VERSION,
        "environment": environment,
        "seed": seed,
        "groups": {name: figures(chosen) for name, chosen in groups(trials).items()},
        "inconclusive": doubts(trials),
        "power": power(trials),
        "seconds": sum(t.seconds for t in trials),
        "not_passed": [asdict(t) for t in trials if t.verdict is not Verdict.PASS],
        "columns": COLUMNS,
        "configurations": [[t.name, t.verdict, *t.gates.values(), t.seconds] for t in trials],
    }
    text = json.dumps(finite(document), allow_nan=False)
    return text.replace('], ["', '],\n["').replace('}, {"', '},\n{"')
