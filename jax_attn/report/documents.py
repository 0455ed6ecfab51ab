"""The results of a run as a terminal table, a summary in words, JSON or Markdown."""

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.judge.result import NotRun, Result
from jax_attn.parity.judge.text import STYLES, colored, finite, number
from jax_attn.report.next_steps import next_steps
from jax_attn.report.schema import CHECK, RUN

COLUMNS = ("case", "level", "verdict", "worst tensor", "error/budget", "ours/torch's")
# Column widths of `case_line`; the longest names of tensors and levels fit.
_WIDTHS = {
    "level": 15,
    "verdict": 12,
    "worst tensor": 34,
    "error/budget": 12,
    "ours/torch's": 12,
}
# title -> key of `NotRun.as_dict`.
_COMPILED_COLUMNS = {
    "design": "design",
    "pass": "direction",
    "level": "level",
    "target": "target",
    "compiler": "compiler",
    "FLOPs": "flops",
    "by": "flops_by",
    "temporaries": "temporaries",
    "error": "error",
}
_LEVEL_IN_WORDS = {
    "compiled": "accepted by the compiler",
    "lowered": "lowered, because no compiler is installed",
    "failed": "NOT accepted by the compiler, for the reasons given",
    "not compiled": "not compiled, because no compiler is installed",
    "refused": "refused by the kernel, for the reasons given",
}


def cells(result: Result) -> tuple[str, ...]:
    """Return a text per column of `COLUMNS`: the case, its verdict, and the deciding tensor."""
    worst = result.worst
    case = (result.name, f"{result.backend} {result.level}", str(result.verdict))
    if worst is None:
        return (*case, "–", "–", "–")
    return (*case, worst.label, number(worst.fraction, 2), number(result.ratio(worst), 2))


def case_line(result: Result | None, width: int) -> Text:
    """Return one line of `cases_table`, for a table printed row by row; for None, its titles.

    width: characters of the column of names.
    """
    values = COLUMNS if result is None else cells(result)
    line = Text()
    for title, value in zip(COLUMNS, values, strict=True):
        columns = width if title == "case" else _WIDTHS[title]
        aligned = value.rjust(columns) if "/" in title else value.ljust(columns)
        style = "bold" if result is None else ""
        if title == "verdict" and result is not None:
            style = STYLES[result.verdict]
        line.append(aligned, style).append("  ")
    return line


def cases_table(results: Iterable[Result]) -> Table:
    """Return a table with a line per case: its verdict, the deciding tensor, and its error."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in COLUMNS:
        figures = "/" in title
        table.add_column(
            title, justify="right" if figures else "left", no_wrap=title == "case", overflow="fold"
        )
    for result in results:
        name, level, _, *decisive = cells(result)
        table.add_row(name, level, colored(result.verdict), *decisive)
    return table


def compiled_table(not_run: Sequence[NotRun]) -> Table:
    """Return a table of what was only compiled or refused; nothing was run, so no verdict."""
    title = "compiled or refused, not run: no verdict"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title)
    for title in _COMPILED_COLUMNS:
        table.add_column(title)
    for item in not_run:
        values = map(item.as_dict().get, _COMPILED_COLUMNS.values())
        table.add_row(*("–" if value is None else f"{value}" for value in values))
    return table


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return the counts of verdicts, and the float32 accuracy."""
    count = Counter(result.verdict for result in results)
    return {
        **{verdict.value.lower(): count[verdict] for verdict in Verdict},
        "float32_error_over_torch": accuracy(results),
    }


def accuracy(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Return the ratio of our RMS error to torch's, both against the oracle: median and worst.

    The statistics cover every tensor of every measured float32 case, overall and by shape. A tensor
    on which torch makes no error has no ratio.
    """
    ratios: dict[str, list[float]] = {"overall": []}
    for result in results:
        if (result.dtype, result.level) != ("float32", "measured"):
            continue
        of_tensors = [t.ratio for t in result.tensors if t.ratio is not None]
        ratios["overall"] += of_tensors
        ratios.setdefault(result.details.get("shape", "given"), []).extend(of_tensors)
    return {
        shape: {"median": statistics.median(values), "worst": max(values), "tensors": len(values)}
        for shape, values in ratios.items()
        if values
    }


def summary_lines(results: Sequence[Result], not_run: Sequence[NotRun] = ()) -> list[str]:
    """Return the summary in words, one line each."""
    count = Counter(result.verdict for result in results)
    verdicts = ", ".join(f"{count[verdict]} {verdict.value.lower()}" for verdict in Verdict)
    levels = Counter(f"{result.level} on {result.backend}" for result in results)
    lines = [f"{verdicts} ({', '.join(f'{n} {level}' for level, n in levels.items())})"]
    listed = Counter(item.level for item in not_run)
    if listed:
        of_levels = (
            f"{listed[level]} {w}" for level, w in _LEVEL_IN_WORDS.items() if listed[level]
        )
        lines.append(f"not run, listed in the report: {'; '.join(of_levels)}")
    lines += [
        f"float32 error over torch's own, {shape}: median {ratio['median']:.2f}, "
        f"worst {ratio['worst']:.2f} ({ratio['tensors']} tensors)"
        for shape, ratio in accuracy(results).items()
    ]
    for sizes in ("tiles", "pages"):
        whose = Counter(r.details.get(sizes, "").partition(":")[0] for r in results)
        counts = [f"{n} {word}" for word, n in whose.most_common() if word]
        lines += [f"{sizes}: {', '.join(counts)}"] if counts else []
    shared = set.intersection(*(set(r.notes) for r in results)) if results else set()
    return lines + [f"note: {note}" for note in sorted(shared)]


def missing_part(results: Sequence[Result], planned: int) -> list[str]:
    """Return a line that says how far an interrupted run got, or no line for a complete run."""
    if len(results) >= planned:
        return []
    return [f"INTERRUPTED: {len(results)} of {planned} cases are judged; this is a part of the run"]


def as_json(
    results: Sequence[Result],
    environment: dict[str, Any],
    not_run: Sequence[NotRun] = (),
    planned: int = 0,
) -> str:
    """Return the run as JSON, a "run" of `schema`; "complete" is false if it was cut short."""
    document = {
        "schema": RUN,
        "environment": environment,
        "complete": not missing_part(results, planned),
        "summary": summary(results),
        "cases": [result.as_dict() for result in results],
        "compiled": [item.as_dict() for item in not_run],
    }
    return json.dumps(finite(document), indent=1, allow_nan=False)


def check_as_json(result: Result, environment: dict[str, Any], command: str) -> str:
    """Return one check as JSON, a "check" of `schema`. command: the line that ran it."""
    document = {
        "schema": CHECK,
        **result.as_dict(),
        "next": [step._asdict() for step in next_steps(result, command)],
        "environment": environment,
    }
    return json.dumps(finite(document), indent=1, allow_nan=False)


def as_markdown(
    results: Sequence[Result],
    environment: dict[str, Any],
    not_run: Sequence[NotRun] = (),
    planned: int = 0,
) -> str:
    """Return the run as Markdown: summary, environment, a table, and the reasons of failures."""
    summarized = [*missing_part(results, planned), *summary_lines(results, not_run)]
    lines = ["# Parity report", "", *(f"- {line}" for line in summarized), ""]
    lines += ["## Environment", "", *(f"- {k}: {v}" for k, v in environment.items()), ""]
    lines += ["## Cases", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for result in results:
        _, *rest = cells(result)
        lines.append(f"| {' | '.join((_name(result), *rest))} |")
    not_passed = [result for result in results if result.verdict is not Verdict.PASS]
    if not_passed:
        lines += ["", "## Not passed"]
        lines += [line for result in not_passed for line in _section(result)]
    if not_run:
        lines += ["", "## Compiled or refused, not run", ""]
        lines += ["These were not run, so they have no verdict; the level says why.", ""]
        for item in not_run:
            lines.append(f"- {', '.join(f'{k} {v}' for k, v in item.as_dict().items())}")
    return "\n".join(lines) + "\n"


def _section(result: Result) -> list[str]:
    """Return the section of a result that does not pass: its cause, if known, then its reasons."""
    lines = ["", f"### {result.verdict} {result.name}", ""]
    if found := result.explanation:
        lines += [f"Cause: {found['sentence']}", ""]
    return lines + [f"- {why}" for why in result.reasons]


def _name(result: Result) -> str:
    """Return the result's name with escaped bars, which would otherwise end a table's cell."""
    return result.name.replace("|", r"\|")
