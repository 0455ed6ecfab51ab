"""The HTML page of a record, which needs no network: `index.html` of `--report`."""

import base64
import importlib.util
from typing import Any

from jax_attn.bench.record import Measurement, Record
from jax_attn.bench.results import words
from jax_attn.bench.results.operations import ABOUT, by_side
from jax_attn.bench.results.table import (
    COMPILED,
    Section,
    absent,
    columns,
    compiled,
    legend,
    sections,
    speed,
)
from jax_attn.environment import install_line
from jax_attn.report.page import MARKS
from jax_attn.report.rendered import rendered


def page(record: Record) -> str:
    """Return the page: the fastest of each section, all tables, and plots if matplotlib exists."""
    leads = [_lead(section, record) for section in sections(record)]
    summary = [words.INTERRUPTED, *leads] if record.interrupted else leads
    return rendered(
        "bench.html",
        words.environment(record),
        said=summary,
        legend=legend(record),
        marks={str(verdict): mark for verdict, mark in MARKS.items()},
        sections=[_section(section, record) for section in sections(record)],
        about_operations=ABOUT,
        plots=_plots(record),
        why_no_plots="" if _can_draw() else f"Plots need matplotlib: {install_line('bench')}",
        compiled_title=COMPILED,
        compiled=[
            *(f"{name}: {what}" for name, what in absent(record)),
            *(compiled(item) for item in record.compiled),
        ],
    )


def _lead(section: Section, record: Record) -> str:
    """Summarize a section in a sentence."""
    if not section.measured:
        return f"{section.title}: nothing was timed"
    first, baseline = section.measured[0], record.settings["baseline"]
    if first.implementation == baseline:
        return f"{section.title}: no implementation is faster than {baseline}"
    if first.ratio is None:
        return f"{section.title}: {first.implementation} takes {words.seconds(first.median_s)}"
    is_sure = speed(first, record) == "faster"
    doubt = "" if is_sure else "; the interval includes 1, so it may not be faster"
    return (
        f"{section.title}: {first.implementation} has {words.ratio(first.ratio)} times the speed "
        f"of {baseline}{doubt}"
    )


def _section(section: Section, record: Record) -> dict[str, Any]:
    shown = columns(section, record)
    slowest = max((row.median_s or 0.0 for row in section.measured), default=0.0)
    return {
        "title": section.title,
        "about": section.about(record),
        "titles": [column.heading for column in shown],
        "rows": [_row(row, record, shown, slowest) for row in section.measured],
        "notes": [f"{name}: {what}" for name, what in section.notes],
        "operations": by_side(section.measured),
    }


def _row(row: Measurement, record: Record, shown: Any, slowest: float) -> dict[str, Any]:
    cells = {column.heading: column.cell(row, record) for column in shown}
    return {"cells": cells, "percent": round(100 * (row.median_s or 0.0) / slowest, 1)}


def _can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _plots(record: Record) -> dict[str, str]:
    """Return the figures as data URIs, by name; none without matplotlib."""
    if not _can_draw():
        return {}
    from jax_attn.bench.results.plot import as_svg, figures

    drawn = {name: as_svg(figure) for name, figure in figures(record).items()}
    return {
        name: f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
        for name, svg in drawn.items()
    }
