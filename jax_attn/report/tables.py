"""Results in tables on a terminal: a line a case, a line a compilation."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table

from jax_attn.parity.judge.not_run import NotRun
from jax_attn.parity.judge.result import Result
from jax_attn.parity.judge.text import colored, number

COLUMNS = ("case", "level", "verdict", "worst tensor", "error/budget", "ours/torch's")
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


def cells(result: Result) -> tuple[str, ...]:
    """One for each of `COLUMNS`: the case, its verdict, and the tensor that decides it."""
    worst = result.worst
    case = (result.name, f"{result.backend} {result.level}", str(result.verdict))
    if worst is None:
        return (*case, "–", "–", "–")
    return (*case, worst.label, number(worst.fraction, 2), number(result.ratio(worst), 2))


def cases_table(results: Iterable[Result]) -> Table:
    """A line a case: its verdict, the tensor that decides it, and by how much."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in COLUMNS:
        figures = "/" in title
        table.add_column(
            title,
            justify="right" if figures else "left",
            no_wrap=title == "case",
            overflow="fold",
        )
    for result in results:
        name, level, _, *decisive = cells(result)
        table.add_row(name, level, colored(result.verdict), *decisive)
    return table


def compiled_table(not_run: Sequence[NotRun]) -> Table:
    """What a compiler accepted or a kernel refused: no verdict, since nothing was run."""
    title = "compiled or refused, not run: no verdict"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title)
    for title in _COMPILED_COLUMNS:
        table.add_column(title)
    for item in not_run:
        values = map(item.as_dict().get, _COMPILED_COLUMNS.values())
        table.add_row(*("–" if value is None else f"{value}" for value in values))
    return table
