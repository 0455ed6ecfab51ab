"""Results as a person reads them and as a program does: terminal, Markdown, JSON.

Imports neither framework: it renders what others measured.
"""

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.judge.not_run import NotRun
from jax_attn.parity.judge.result import Result
from jax_attn.parity.judge.text import SCHEMA_VERSION, colored, number

_LEVEL_IN_WORDS = {
    "compiled": "accepted by the compiler",
    "lowered": "lowered, as there is no compiler here",
    "failed": "NOT accepted by the compiler, for the reasons given",
    "not compiled": "not compiled, as there is no compiler here",
    "refused": "refused by the kernel, for the reasons given",
}
_COLUMNS = ("case", "level", "verdict", "worst tensor", "error/budget", "ours/torch's")
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


def _row(result: Result) -> tuple[str, str, str, str, str, str]:
    worst = result.worst
    level = f"{result.backend} {result.level}"
    if worst is None:
        return result.name, level, str(result.verdict), "–", "–", "–"
    figures = (number(worst.fraction, 2), number(result.ratio(worst), 2))
    return result.name, level, str(result.verdict), worst.label, *figures


def cases_table(results: Iterable[Result]) -> Table:
    """A line a case: its verdict, the tensor that decides it, and by how much."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in _COLUMNS:
        justify = "right" if "/" in title else "left"
        table.add_column(title, justify=justify, no_wrap=title == "case", overflow="fold")
    for result in results:
        name, level, _, *rest = _row(result)
        table.add_row(name, level, colored(result.verdict), *rest)
    return table


def compiled_table(compiled: Sequence[NotRun]) -> Table:
    """What a compiler accepted or a kernel refused: no verdict, since nothing was run."""
    title = "compiled or refused, not run: no verdict"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title)
    for title in _COMPILED_COLUMNS:
        table.add_column(title)
    for item in compiled:
        cells = map(item.as_dict().get, _COMPILED_COLUMNS.values())
        table.add_row(*("–" if cell is None else f"{cell}" for cell in cells))
    return table


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Counts of verdicts, and the float32 accuracy."""
    count = [r.verdict for r in results].count
    return {
        "pass": count(Verdict.PASS),
        "fail": count(Verdict.FAIL),
        "inconclusive": count(Verdict.INCONCLUSIVE),
        "float32_error_over_torch": accuracy(results),
    }


def accuracy(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Our RMS error over torch's own, both against the oracle: median and worst.

    Over every tensor of every measured float32 case, all together and by shape; a tensor on
    which torch makes no error has no ratio.
    """
    ratios: dict[str, list[float]] = {"overall": []}
    for result in results:
        if (result.dtype, result.level) != ("float32", "measured"):
            continue
        found = [t.ratio for t in result.tensors if t.ratio is not None]
        ratios["overall"] += found
        ratios.setdefault(result.details.get("shape", "given"), []).extend(found)
    return {
        shape: {"median": statistics.median(values), "worst": max(values), "tensors": len(values)}
        for shape, values in ratios.items()
        if values
    }


def summary_lines(results: Sequence[Result], compiled: Sequence[NotRun]) -> list[str]:
    """The summary in words."""
    found = summary(results)
    levels: dict[str, int] = {}
    for result in results:
        level = f"{result.level} on {result.backend}"
        levels[level] = levels.get(level, 0) + 1
    by_level = ", ".join(f"{n} {level}" for level, n in levels.items())
    lines = [
        f"{found['pass']} pass, {found['fail']} fail, {found['inconclusive']} inconclusive "
        f"({by_level})"
    ]
    for level, said in _LEVEL_IN_WORDS.items():
        if n := sum(item.level == level for item in compiled):
            lines.append(f"{n} {said}, not run, listed apart")
    for shape, ratio in found["float32_error_over_torch"].items():
        lines.append(
            f"float32 error over torch's own, {shape}: median {ratio['median']:.2f}, "
            f"worst {ratio['worst']:.2f} ({ratio['tensors']} tensors)"
        )
    shared = set.intersection(*(set(r.notes) for r in results)) if results else set()
    return lines + [f"note: {note}" for note in sorted(shared)]


def as_json(
    results: Sequence[Result], environment: dict[str, Any], compiled: Sequence[NotRun]
) -> str:
    """The whole run, by schema version 1."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "environment": environment,
        "summary": summary(results),
        "cases": [r.as_dict() for r in results],
        "compiled": [item.as_dict() for item in compiled],
    }
    return json.dumps(document, indent=1, allow_nan=False)


def as_markdown(
    results: Sequence[Result], environment: dict[str, Any], compiled: Sequence[NotRun]
) -> str:
    """Summary, environment and one table, for a person."""
    lines = ["# Parity report", "", *(f"- {line}" for line in summary_lines(results, compiled)), ""]
    lines += ["## Environment", "", *(f"- {k}: {v}" for k, v in environment.items()), ""]
    lines += ["## Cases", "", f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    lines += [f"| {' | '.join(_row(r))} |" for r in results]
    doubted = [r for r in results if r.verdict is not Verdict.PASS]
    if doubted:
        lines += ["", "## Not passed", ""]
        lines += [f"- {r.name}: {reason}" for r in doubted for reason in r.reasons]
    if compiled:
        lines += ["", "## Compiled or refused, not run", "", "No verdict: see the level.", ""]
        lines += [
            f"- {', '.join(f'{k} {v}' for k, v in item.as_dict().items())}" for item in compiled
        ]
    return "\n".join(lines) + "\n"


def write(directory: Path, files: dict[str, str]) -> None:
    """Each file whole or not at all: written beside, then put in place."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        beside = directory / f".{name}.{os.getpid()}"
        beside.write_text(text, encoding="utf-8")
        beside.replace(directory / name)
