"""Format figures, tables and single tensors for a terminal. Imports neither framework."""

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from jax_attn.parity.judge.compare import TensorReport, Verdict

SCHEMA_VERSION = 1
"""Schema version of the JSON documents of `power` and `calibrate`."""
STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.INCONCLUSIVE: "yellow"}


def number(x: float | None, digits: int = 3) -> str:
    """Format a number with `digits` significant digits; a dash for None and NaN."""
    return "–" if x is None or math.isnan(x) else f"{x:.{digits}g}"


def joined(names: Sequence[str]) -> str:
    """Join names as in a sentence: "a, b and c"."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def quoted(names: Sequence[str], most: int = 10) -> str:
    """Join names in backquotes; of more than `most`, only the first, and the number left out."""
    shown = [f"`{name}`" for name in names[:most]]
    return joined([*shown, f"{len(names) - most} more"] if len(names) > most else shown)


def finite(tree: Any) -> Any:
    """Return plain data for JSON, with null for each number that is not finite."""
    if isinstance(tree, dict):
        return {name: finite(branch) for name, branch in tree.items()}
    if isinstance(tree, list | tuple):
        return [finite(branch) for branch in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def colored(verdict: Verdict) -> Text:
    return Text(str(verdict), style=STYLES[verdict])


def console(**options: Any) -> Console:
    """Return a console that is wide enough for tables if there is no terminal to fit."""
    terminal = Console(**options)
    return terminal if terminal.is_terminal else Console(width=140, **options)


def plain(renderable: Any) -> str:
    """Render to text as a console without colors."""
    out = io.StringIO()
    console(file=out).print(renderable)
    return out.getvalue().rstrip()


@dataclass(frozen=True)
class Hanging:
    """Text of which only the first line is not indented, however it is wrapped.

    It may quote the port, which then cannot begin a line that looks like a verdict.
    """

    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = self.text.wrap(console, max(1, options.max_width - len(_INDENT)))
        for i, line in enumerate(lines):
            yield Text(_INDENT) + line if i else line


_INDENT = "  "


def tensor_table(tensors: Iterable[TensorReport], *, ratios: bool) -> Table:
    """Return a table with a line per tensor.

    ratios: whether to show our errors over torch's, which need the same roundoff in both.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("transform")
    table.add_column("tensor", overflow="fold")
    table.add_column("verdict")
    for title in ("error/budget", "our error", "ours/torch's", "scale"):
        table.add_column(title, justify="right")
    for t in tensors:
        figures = (t.fraction, t.error, t.ratio if ratios else None, t.scale)
        table.add_row(t.transform, t.label, colored(t.verdict), *map(number, figures))
    return table


def worst_element(tensor: TensorReport) -> str:
    """Describe the element with the largest error over budget: its index and both numbers."""
    return (
        f"worst: {tensor.transform} {tensor.label}{list(tensor.index)} of {list(tensor.shape)}: "
        f"expected {tensor.want:.9g}, got {tensor.got:.9g}, allowed ±{tensor.allowed:.2g}"
    )
