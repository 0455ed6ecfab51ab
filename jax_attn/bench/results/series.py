"""What the plots show of a record: lines against length, shares of the roofline. Plain data."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from jax_attn.bench.record import Measurement, Record
from jax_attn.bench.results import words
from jax_attn.bench.results.table import roofline_share, sections
from jax_attn.bench.workload import Workload

Shares: TypeAlias = list[tuple[Measurement, float]]
"""Measurements of one workload with their shares of the roofline."""


class Quantity(NamedTuple):
    """What can stand against length.

    said: a figure in words. base: the axis' logarithm's. of: a row's (low, middle, high), None
    where it has none that such an axis could show. at_end: what the longest row says beside the
    name. about: for the caption, {baseline} to be filled in.
    """

    name: str
    title: str
    said: Callable[[float], str]
    base: int
    of: Callable[[Measurement], tuple[float, float, float] | None]
    at_end: Callable[[Measurement], str]
    about: str


class Line(NamedTuple):
    """points: (length, low, middle, high), the shortest first."""

    implementation: str
    framework: str
    points: tuple[tuple[int, float, float, float], ...]
    label: str


def _rounds(row: Measurement) -> tuple[float, float, float]:
    return min(row.seconds), row.median_s, max(row.seconds)


def _peak(row: Measurement) -> tuple[float, float, float] | None:
    return (row.peak_bytes,) * 3 if row.peak_bytes else None


QUANTITIES = (
    Quantity(
        "time",
        "Time of one call against length",
        words.seconds,
        10,
        _rounds,
        lambda row: f"{words.digits(row.ratio.median)}×" if row.ratio else "",
        "Line: median of the rounds; band: from the fastest to the slowest. ×: speed over "
        "{baseline} where the line ends.",
    ),
    Quantity(
        "memory",
        "Peak memory against length",
        words.size,
        2,
        _peak,
        lambda row: words.size(row.peak_bytes),
        "Peak of the process during a call, with its results, over what it held before.",
    ),
)


def families(record: Record) -> dict[Workload, list[Workload]]:
    """The workloads that differ in length alone, two at least, the shortest first.

    The key is what they share: a workload without name and length.
    """
    found: dict[Workload, list[Workload]] = {}
    for workload in dict.fromkeys(row.workload for row in record.rows):
        if workload.T == workload.S:
            found.setdefault(replace(workload, name="", T=0, S=0), []).append(workload)
    return {
        key: sorted(members, key=lambda w: w.T)
        for key, members in found.items()
        if len({w.T for w in members}) > 1
    }


def lines(record: Record, members: Sequence[Workload], mode: str, quantity: Quantity) -> list[Line]:
    """One for each implementation that has the quantity, the highest at its end first."""
    rows: dict[tuple[str, str], list[Measurement]] = {}
    for row in record.rows:
        if row.workload in members and row.mode == mode and row.seconds and quantity.of(row):
            rows.setdefault((row.implementation, row.framework), []).append(row)
    found = []
    for (implementation, framework), given in rows.items():
        given.sort(key=lambda row: row.workload.T)
        points = tuple((row.workload.T, *quantity.of(row)) for row in given)
        label = f"{implementation}  {quantity.at_end(given[-1])}".rstrip()
        found.append(Line(implementation, framework, points, label))
    return sorted(found, key=lambda line: line.points[-1][2], reverse=True)


def shares(record: Record, mode: str) -> list[tuple[Workload, Shares]]:
    """For each workload its rows with their share of the roofline, the fastest first."""
    found = []
    for section in sections(record):
        rows = [(row, roofline_share(row, record)) for row in section.measured]
        rows = [(row, share) for row, share in rows if share is not None]
        if section.mode == mode and rows:
            found.append((section.workload, rows))
    return found


def apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Positions as near as can be to those wanted, ascending, and at least `gap` apart."""
    # Less i·gap they need only not descend: least squares pools what does.
    pools: list[tuple[float, int]] = []
    for i, position in enumerate(wanted):
        mean, size = position - i * gap, 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, size = (before * many + mean * size) / (many + size), many + size
        pools.append((mean, size))
    flat = [mean for mean, size in pools for _ in range(size)]
    return [mean + i * gap for i, mean in enumerate(flat)]
