"""Two runs of the bench, row by row: what became slower.

What is compared is a row's time over its own run's baseline, so that a machine that is slower
today does not look like a regression. Rows pair by workload, mode and implementation.

A regression is a row that is slower by more than the threshold and whose whole bootstrap
interval lies above 1: the threshold says what is worth stopping for, the interval that it is no
noise of the rounds. Runs differ by more than their rounds do (memory layout, other processes):
a threshold below that cries wolf whatever the interval.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jax_attn.bench import statistics
from jax_attn.bench.record import Measurement, Ratio, Record, Status, finite

SCHEMA = "jax-attn bench compare 1"

# What a row that was measured before must not become.
WORSE = (Status.EXCLUDED, Status.FAILED)

# What must be alike for a ratio to mean anything, and where a record has it.
ALIKE = {
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
    """One row in both runs.

    over_baseline: its time over its run's baseline, after over before: above 1 is slower. None
    for the baseline itself, which has nothing to be compared with.
    """

    before: Measurement
    after: Measurement
    over_baseline: Ratio | None

    def slower_by(self, threshold: float) -> bool:
        found = self.over_baseline
        return found is not None and found.median > 1 + threshold and found.low > 1


@dataclass(frozen=True)
class Comparison:
    """What became of every row that at least one of the runs measured.

    threshold: as a fraction. unpaired: (row, why it has no ratio). broken: those of them that
    were measured before and are now excluded, their numbers being wrong, or failed. versions:
    package → (before, after), None where absent.
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
        """Plain data, an open end of an interval as null."""
        rows = [
            _identity(change.before)
            | {
                "before_s": change.before.median_s,
                "after_s": change.after.median_s,
                "over_baseline": change.over_baseline and asdict(change.over_baseline),
                "regression": change.slower_by(self.threshold),
            }
            for change in self.changes
        ]
        unpaired = [
            _identity(row) | {"why": why, "failure": row in self.broken}
            for row, why in self.unpaired
        ]
        versions = {name: list(pair) for name, pair in self.versions.items()}
        return finite(
            {
                "schema": SCHEMA,
                "threshold": self.threshold,
                "versions": versions,
                "rows": rows,
                "unpaired": unpaired,
            }
        )


def differences(before: Record, after: Record) -> list[str]:
    """Every reason why no ratio may be formed of two runs; none where one may.

    Raises ValueError, naming it, where a record does not say what is to be alike.
    """
    found = []
    for name, of in ALIKE.items():
        try:
            was, now = of(before), of(after)
        except KeyError:
            raise ValueError(f"expected both records to say {name}") from None
        if was != now:
            found.append(f"{name}: {was} before, {now} after")
    return found


def compare(before: Record, after: Record, threshold: float) -> Comparison:
    """Every row of both runs, paired or with the reason why not.

    threshold: how much slower is a regression, as a fraction: 0.05 is 5%. Raises ValueError with
    all `differences`.
    """
    if problems := differences(before, after):
        raise ValueError("; ".join(problems))
    was, now = _rows(before), _rows(after)
    baseline = before.settings["baseline"]
    changes, unpaired, broken = [], [], []
    for key in dict.fromkeys([*was, *now]):
        old, new = was.get(key), now.get(key)
        if not any(row and row.seconds for row in (old, new)):
            continue
        workload, mode, name = key
        peers = was.get((workload, mode, baseline)), now.get((workload, mode, baseline))
        why = "; ".join(_why_unpaired(old, new, peers, baseline))
        if why:
            unpaired.append((new or old, why))
        elif name == baseline:
            changes.append(Change(old, new, None))
        else:
            times = [
                statistics.shared(peer.seconds, row.seconds)
                for peer, row in zip(peers, (old, new), strict=True)
            ]
            changes.append(Change(old, new, statistics.change(*times)))
        if old and new and old.seconds and new.status in WORSE:
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


def _why_unpaired(old, new, peers, baseline: str) -> Iterator[str]:
    for row, when in ((old, "before"), (new, "after")):
        if row is None:
            yield f"not in the run {when}"
        elif not row.seconds:
            yield f"{row.status} {when}" + (f": {row.reason}" if row.reason else "")
    if old and new and old.seconds and new.seconds:
        for peer, when in zip(peers, ("before", "after"), strict=True):
            if peer is None or not peer.seconds:
                yield f"its baseline, {baseline}, has no time {when}"


def _rows(record: Record) -> dict[tuple, Measurement]:
    return {(row.workload, row.mode, row.implementation): row for row in record.rows}


def _identity(row: Measurement) -> dict[str, Any]:
    return {
        "workload": row.workload.name,
        "mode": row.mode,
        "implementation": row.implementation,
    }
