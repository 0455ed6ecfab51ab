"""The HTML page of a run of checks, which needs no network: `index.html` of `--report`."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from jax_attn.parity.judge.compare import TensorReport, Verdict, worst_first
from jax_attn.parity.judge.result import SHOWN, NotRun, Result
from jax_attn.parity.judge.text import number, worst_element
from jax_attn.report.documents import COLUMNS, cells, missing_part, summary_lines
from jax_attn.report.rendered import rendered

MARKS = {Verdict.PASS: "✓", Verdict.INCONCLUSIVE: "?", Verdict.FAIL: "✗"}
_MAPPED = 3
"""The largest number of failed tensors of a result that are drawn, the worst first."""
_DECADES = 4
"""The number of powers of ten beyond the budget that shades and bars distinguish."""


class Bar(NamedTuple):
    """A bar for error over budget: half of the width is the budget, the rest is logarithmic.

    percent: length, of the width. text: the figure. is_over: whether it exceeds the budget.
    """

    percent: float
    text: str
    is_over: bool

    @classmethod
    def of(cls, fraction: float) -> "Bar":
        text = number(fraction)
        if math.isnan(fraction):
            return cls(0.0, text, is_over=False)
        if fraction <= 1:
            return cls(round(50 * fraction, 1), text, is_over=False)
        beyond = min(math.log10(fraction) / _DECADES, 1.0) if math.isfinite(fraction) else 1.0
        return cls(round(50 + 50 * beyond, 1), text, is_over=True)


class Cell(NamedTuple):
    """Adjacent cells of one shade in a row of a map; shade 0 is within budget, others by decade."""

    x: int
    width: int
    y: int
    shade: int


class MapDrawing(NamedTuple):
    """A map of errors over a tensor's last two axes.

    title: the tensor, the place and the axes. worst: the largest error over budget.
    """

    title: str
    columns: int
    rows: int
    cells: tuple[Cell, ...]
    worst: str


def page(
    results: Sequence[Result],
    environment: dict[str, Any],
    not_run: Sequence[NotRun] = (),
    planned: int = 0,
) -> str:
    """Return the page: the verdict, a row per case, and for those not passed, where the error is.

    planned: the number of rows that a whole run judges.
    """
    verdict = Verdict.worst(result.verdict for result in results)
    # Failures come first, because a run may have hundreds of cases.
    results = sorted(results, key=lambda result: [*MARKS].index(result.verdict), reverse=True)
    return rendered(
        "page.html",
        environment,
        verdict=verdict,
        marks={str(verdict): mark for verdict, mark in MARKS.items()},
        said=[*missing_part(results, planned), *summary_lines(results, not_run)],
        titles=COLUMNS,
        rows=[_row(i, result) for i, result in enumerate(results)],
        sections=[
            _section(i, result)
            for i, result in enumerate(results)
            if result.verdict is not Verdict.PASS
        ],
        not_run=[", ".join(f"{k} {v}" for k, v in item.as_dict().items()) for item in not_run],
    )


def _row(i: int, result: Result) -> dict[str, Any]:
    name, level, verdict, worst, _, ratio = cells(result)
    fraction = math.nan if result.worst is None else result.worst.fraction
    link = "" if result.verdict is Verdict.PASS else f"case-{i}"
    return {
        "link": link,
        "verdict": verdict,
        "bar": Bar.of(fraction),
        "cells": dict(zip(COLUMNS, (name, level, verdict, worst, "", ratio), strict=True)),
    }


def _section(i: int, result: Result) -> dict[str, Any]:
    ranked = worst_first(result.tensors)
    failed = [t for t in ranked if t.verdict is Verdict.FAIL]
    worst = result.worst
    says_where = worst is not None and worst.verdict is Verdict.FAIL and worst.index
    return {
        "link": f"case-{i}",
        "name": result.name,
        "verdict": str(result.verdict),
        "about": f"{result.dtype} on {result.backend}, {result.level}",
        "reasons": result.reasons[:SHOWN],
        "more_reasons": len(result.reasons) - SHOWN,
        "worst": worst_element(worst) if worst is not None and says_where else "",
        "tensors": [_tensor(t, result) for t in ranked[:SHOWN]],
        "more_tensors": len(ranked) - SHOWN,
        "maps": [map_ for t in failed[:_MAPPED] for map_ in maps(t)],
        "notes": result.notes,
        "explanation": result.explanation,
    }


def _tensor(t: TensorReport, result: Result) -> dict[str, Any]:
    figures = map(number, (t.error, result.ratio(t), t.scale))
    return {
        "cells": (t.transform, t.label, str(t.verdict)),
        "bar": Bar.of(t.fraction),
        "figures": tuple(figures),
    }


def maps(t: TensorReport) -> Iterator[MapDrawing]:
    """Yield each of the tensor's maps, with adjacent cells of one shade joined."""
    rank, places = len(t.shape), t.shape[-3] if len(t.shape) > 2 else 1
    for place, rows in t.heat:
        joined = []
        for y, row in enumerate(rows):
            x = 0
            for shade, alike in groupby(map(_shade, row)):
                width = len([*alike])
                joined.append(Cell(x, width, y, shade))
                x += width
        index = ", ".join((*":" * (rank - 3), str(place), ":", ":"))
        at = f"[{index}], {place + 1} of {places}" if rank > 2 else ""
        axes = f"axes {rank - 2} and {rank - 1}" if rank > 1 else "axis 0"
        worst = number(max(map(max, rows)))
        yield MapDrawing(f"{t.label}{at}: {axes}", len(rows[0]), len(rows), tuple(joined), worst)


def _shade(fraction: float) -> int:
    if fraction <= 1:
        return 0
    decades = math.log10(fraction) if math.isfinite(fraction) else _DECADES
    return 1 + min(int(decades), _DECADES)
