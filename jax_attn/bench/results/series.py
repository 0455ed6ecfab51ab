"""The data of a record's plots: lines against length, and shares of the roofline."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple, TypeAlias

from jax_attn.bench.record import Measurement, Record
from jax_attn.bench.results import words
from jax_attn.bench.results.table import roofline_share, sections
from jax_attn.bench.workload import PairWorkload, Workload

Shares: TypeAlias = list[tuple[Measurement, float]]
"""Measurements of one workload with their shares of the roofline."""

Span: TypeAlias = tuple[float, float, float]
"""Low, middle, high."""


class Quantity(NamedTuple):
    """A quantity that can be plotted against length.

    in_words: formats a figure. base: the base of the logarithmic axis. of: returns (low, middle,
    high) of a measurement that has times, or None if a logarithmic axis cannot show it. at_end:
    returns the text next to the name at the end of a line. about: text of the caption, with
    {baseline} to be filled in.
    """

    name: str
    title: str
    in_words: Callable[[float], str]
    base: int
    of: Callable[[Measurement], Span | None]
    at_end: Callable[[Measurement], str]
    about: str


class PlottedLine(NamedTuple):
    """The line of an implementation. points: (length, low, middle, high), the shortest first."""

    implementation: str
    framework: str
    points: tuple[tuple[int, float, float, float], ...]
    label: str


QUANTITIES = (
    Quantity(
        "time",
        "Time of one call against length",
        words.seconds,
        10,
        lambda row: (min(row.seconds), median(row.seconds), max(row.seconds)),
        lambda row: f"{words.digits(row.ratio.median)}×" if row.ratio else "",
        "Line: median of the rounds; band: from the fastest to the slowest. ×: speed over "
        "{baseline} at the end of the line.",
    ),
    Quantity(
        "memory",
        "Peak memory against length",
        words.size,
        2,
        lambda row: (peak, peak, peak) if (peak := row.peak_bytes) else None,
        lambda row: words.size(row.peak_bytes),
        "Peak memory of the process during a call, with its results, beyond what it held before.",
    ),
    Quantity(
        "compile",
        "Time to compile against length",
        words.seconds,
        10,
        lambda row: (cold, cold, cold) if (cold := row.compile_s) else None,
        lambda row: words.seconds(row.compile_s),
        "One compilation, with tracing, without a cache.",
    ),
)


def families(record: Record) -> dict[Workload | PairWorkload, list[Workload | PairWorkload]]:
    """Group workloads that differ only in length, at least two each, the shortest first.

    The key is what they share: a workload without a length, and without a name unless it is a pair.
    """
    by_shape: dict[Any, list[Any]] = {}
    for workload in dict.fromkeys(row.workload for row in record.rows):
        if isinstance(workload, PairWorkload):
            name = workload.name.removesuffix(f", length {workload.length}")
            shared: Any = replace(workload, name=name, inputs="", length=0)
        elif workload.T == workload.S:
            shared = replace(workload, name="", T=0, S=0)
        else:
            continue
        by_shape.setdefault(shared, []).append(workload)
    return {
        key: sorted(members, key=_length)
        for key, members in by_shape.items()
        if len({*map(_length, members)}) > 1
    }


def _length(workload: Workload | PairWorkload) -> int:
    return workload.length if isinstance(workload, PairWorkload) else workload.T


def lines(
    record: Record, members: Sequence[Workload | PairWorkload], mode: str, quantity: Quantity
) -> list[PlottedLine]:
    """Return a line for each implementation that has the quantity, the highest end first."""
    by_name: dict[tuple[str, str], list[tuple[Measurement, Span]]] = {}
    of_members = [(w, row) for w in members for row in record.rows if row.workload == w]
    for _, row in sorted(of_members, key=lambda pair: _length(pair[0])):
        if row.mode == mode and row.seconds and (span := quantity.of(row)):
            by_name.setdefault((row.implementation, row.framework), []).append((row, span))
    lines = []
    lengths: dict[Any, int] = {workload: _length(workload) for workload in members}
    for (implementation, framework), spans in by_name.items():
        points = tuple((lengths[row.workload], *span) for row, span in spans)
        label = f"{implementation}  {quantity.at_end(spans[-1][0])}".rstrip()
        lines.append(PlottedLine(implementation, framework, points, label))
    return sorted(lines, key=lambda line: line.points[-1][2], reverse=True)


def shares(record: Record, mode: str) -> list[tuple[Workload | PairWorkload, Shares]]:
    """Return each workload with its rows and their share of the roofline, the fastest first."""
    panels = []
    for section in sections(record):
        both = ((row, roofline_share(row, record)) for row in section.measured)
        rows = [(row, share) for row, share in both if share is not None]
        if section.mode == mode and rows:
            panels.append((section.workload, rows))
    return panels
