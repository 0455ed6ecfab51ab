"""Compare two runs of the bench, measurement by measurement, and find what became slower.

Each time is divided by the time of its own run's baseline, so that a machine that is slower today
does not look like a regression. Measurements are paired by workload, mode and implementation.

A regression is slower by more than the threshold, and its whole bootstrap interval lies above 1.
The threshold says how much matters; the interval shows that it is not the noise of the rounds. Runs
differ by more than their rounds do (memory layout, other processes), so a threshold below that
difference gives false alarms whatever the interval.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from rich import box
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jax_attn.bench import statistics
from jax_attn.bench.record import Measurement, Ratio, Record, Status
from jax_attn.bench.results import words
from jax_attn.bench.results.table import SPEEDS
from jax_attn.bench.workload import PairWorkload, Workload
from jax_attn.parity.judge.text import finite

SCHEMA = "jax-attn bench compare 1"

Pair: TypeAlias = tuple[Measurement | None, Measurement | None]
"""The same measurement before and after."""

# The statuses that count as broken after an implementation was measured before.
WORSE = (Status.EXCLUDED, Status.FAILED)

# Properties of a record that must be equal for a ratio to mean anything.
ALIKE: dict[str, Callable[[Record], Any]] = {
    "processor": lambda record: record.environment["processor"],
    "cores": lambda record: record.environment["cores"],
    "devices": lambda record: record.environment["devices"],
    "device": lambda record: record.settings["device"],
    "threads": lambda record: record.settings["threads"],
    "precision": lambda record: record.settings["precision"],
    "baseline": lambda record: record.settings["baseline"],
    "dtypes": lambda record: sorted({row.workload.dtype for row in record.rows}),
}


@dataclass(frozen=True)
class Change:
    """One measurement in both runs.

    over_baseline: the ratio, after to before, of its time over its run's baseline; above 1 is
    slower. None for the baseline itself.
    """

    before: Measurement
    after: Measurement
    over_baseline: Ratio | None

    def slower_by(self, threshold: float) -> bool:
        change = self.over_baseline
        return change is not None and change.median > 1 + threshold and change.low > 1


@dataclass(frozen=True)
class Comparison:
    """Everything that at least one of the runs measured, paired or not.

    threshold: as a fraction. unpaired: (measurement, why it has no ratio). broken: rows that were
    measured before and now fail, are excluded, or disagree. versions: package → (before, after),
    with None if it is absent.
    """

    threshold: float
    changes: tuple[Change, ...]
    unpaired: tuple[tuple[Measurement, str], ...]
    broken: tuple[Measurement, ...]
    versions: Mapping[str, tuple[str | None, str | None]]

    @property
    def regressions(self) -> list[Change]:
        return [change for change in self.changes if change.slower_by(self.threshold)]

    @property
    def compared(self) -> int:
        return sum(change.over_baseline is not None for change in self.changes)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; null stands for an interval's missing upper end."""
        rows = [
            _identity(change.before)
            | {
                "before_s": change.before.median_s,
                "after_s": change.after.median_s,
                "over_baseline": change.over_baseline and asdict(change.over_baseline),
                "regression": change.slower_by(self.threshold),
                "failure": change.after in self.broken,
            }
            for change in self.changes
        ]
        unpaired = [
            _identity(row) | {"why": why, "failure": row in self.broken}
            for row, why in self.unpaired
        ]
        whole = {"schema": SCHEMA, "threshold": self.threshold, "versions": dict(self.versions)}
        return finite(whole | {"rows": rows, "unpaired": unpaired})


def differences(before: Record, after: Record) -> list[str]:
    """Return every reason why the times of two runs cannot be compared; empty if they can.

    Raises ValueError, with its name, if a record lacks a property that must be equal.
    """
    problems = []
    for name, of in ALIKE.items():
        try:
            was, now = of(before), of(after)
        except KeyError:
            raise ValueError(f"expected both records to contain {name}") from None
        if was != now:
            problems.append(f"{name}: {was} before, {now} after")
    return problems


def compare(before: Record, after: Record, threshold: float) -> Comparison:
    """Pair the measurements of both runs, or give the reason why one has no counterpart.

    threshold: the slowdown that counts as a regression, as a fraction: 0.05 is 5%. Raises
    ValueError with all `differences`.
    """
    if problems := differences(before, after):
        raise ValueError("; ".join(problems))
    was, now = _rows(before), _rows(after)
    baseline = before.settings["baseline"]
    changes: list[Change] = []
    unpaired: list[tuple[Measurement, str]] = []
    broken: list[Measurement] = []
    for key in dict.fromkeys([*was, *now]):
        old, new = was.get(key), now.get(key)
        latest = new or old
        if latest is None or not any(row and row.seconds for row in (old, new)):
            continue
        workload, mode, name = key
        peers = was.get((workload, mode, baseline)), now.get((workload, mode, baseline))
        if reasons := "; ".join(_why_unpaired(old, new, peers, baseline)):
            unpaired.append((latest, reasons))
        if old and new and not reasons:
            ratio = None if name == baseline else _over_baseline((old, new), peers)
            changes.append(Change(old, new, ratio))
        if old and new and old.seconds and _is_worse(old, new):
            broken.append(new)
    versions = before.environment["packages"], after.environment["packages"]
    names = dict.fromkeys([*versions[0], *versions[1]])
    return Comparison(
        threshold,
        tuple(changes),
        tuple(unpaired),
        tuple(broken),
        {name: (versions[0].get(name), versions[1].get(name)) for name in names},
    )


def _is_worse(old: Measurement, new: Measurement) -> bool:
    return new.status in WORSE or new.verdict == "FAIL" != old.verdict


def _over_baseline(rows: Pair, peers: Pair) -> Ratio:
    before, after = (
        statistics.shared(peer.seconds, row.seconds)
        for row, peer in zip(rows, peers, strict=True)
        if row and peer
    )
    return statistics.change(before, after)


def _why_unpaired(
    old: Measurement | None, new: Measurement | None, peers: Pair, baseline: str
) -> Iterator[str]:
    for row, when in ((old, "before"), (new, "after")):
        if row is None:
            yield f"not in the run {when}"
        elif not row.seconds:
            yield f"{row.status} {when}" + (f": {row.reason}" if row.reason else "")
    if old and new and old.seconds and new.seconds:
        for peer, when in zip(peers, ("before", "after"), strict=True):
            if peer is None or not peer.seconds:
                yield f"its baseline, {baseline}, has no time {when}"


def _rows(record: Record) -> dict[tuple[Workload | PairWorkload, str, str], Measurement]:
    return {(row.workload, row.mode, row.implementation): row for row in record.rows}


def _identity(row: Measurement) -> dict[str, Any]:
    return {"workload": row.workload.name, "mode": row.mode, "implementation": row.implementation}


def comparison_table(comparison: Comparison, width: int) -> Group:
    """Show two runs side by side, the largest slowdown first; then rows without a ratio, and why.

    width: the console's width; if it is too narrow, the two times are left out.
    """
    titles = ["workload", "mode", "implementation", "before", "after", "change [95%]", ""]
    rows = []
    for change in sorted(comparison.changes, key=_slowdown, reverse=True):
        row, outcome = change.before, _outcome(change, comparison)
        times = (words.seconds(r.median_s) for r in (change.before, change.after))
        named = (row.workload.name, row.mode, row.implementation, *times)
        cells = (*named, words.ratio(change.over_baseline), outcome)
        rows.append(dict(zip(titles, cells, strict=True)))
    lines = [{title: title for title in titles}, *rows]
    needed = sum(2 + max(cell_len(line[title]) for line in lines) for title in titles)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown = [t for t in titles if needed <= width or t not in ("before", "after")]
    for title in shown:
        figure = title in ("before", "after", "change [95%]")
        table.add_column(title, justify="right" if figure else "left", no_wrap=True)
    for line in rows:
        is_worse = line[""] in ("REGRESSION", "WRONG")
        table.add_row(*(line[t] for t in shown), style="bold red" if is_worse else "")
    head = [
        Text(f"{name} {was or 'absent'} → {now or 'absent'}")
        for name, (was, now) in comparison.versions.items()
        if was != now
    ]
    notes = [
        Text(
            f"- {row.workload.name}, {row.mode}, {row.implementation}: {why}",
            style="bold red" if row in comparison.broken else "",
        )
        for row, why in comparison.unpaired
    ]
    summary = (
        f"{comparison.compared} rows compared, {len(comparison.regressions)} slower by more than "
        f"{100 * comparison.threshold:g}%, {len(comparison.broken)} now wrong or failed, "
        f"{len(comparison.unpaired)} without a ratio"
    )
    about = "change: ratio of a row's time over its own run's baseline; above 1 is slower"
    return Group(*head, table, *notes, Text(summary, style="bold"), Text(about, style="dim"))


def _slowdown(change: Change) -> float:
    return change.over_baseline.median if change.over_baseline else 0.0


def _outcome(change: Change, comparison: Comparison) -> str:
    if change.after in comparison.broken:
        return "WRONG"
    if change.over_baseline is None:
        return "baseline"
    if change.slower_by(comparison.threshold):
        return "REGRESSION"
    return SPEEDS[-change.over_baseline.side]  # the ratio is of times: above 1 is slower
