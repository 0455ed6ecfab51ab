"""Tables of a record, with a section for each workload and mode, the fastest row first.

Rows without a time are listed below with the reason, never dropped.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping
from csv import writer as csv_writer
from typing import Any, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from jax_attn.bench.record import READS, Measurement, Record, Status
from jax_attn.bench.results import operations, words
from jax_attn.bench.workload import CACHED, DECODE, PAIR_MODES, PREFILL, PairWorkload, Workload
from jax_attn.parity.judge.text import number

COMPILED = "Compiled for a device that is absent: the compiler's figures, not measured"
_COMPILED: dict[str, Callable[[Any], str]] = {
    "level": lambda _: "",  # stated once, above
    **dict.fromkeys(("workload", "mode", "error", "missing", "target", "compiler"), str),
    "seconds": lambda x: f"compiled in {words.seconds(x)}",
    "useful_flops": lambda x: f"{words.digits(x / 1e9)} GFLOP useful",
    "flops": lambda x: f"{words.digits(x / 1e9)} as XLA counts (a loop's body once)",
    "bytes": lambda n: f"accesses {words.size(n)} (by the same count)",
    "temporaries": lambda n: f"temporaries {words.size(n)}",
    "arguments": lambda n: f"arguments {words.size(n)}",
    "outputs": lambda n: f"outputs {words.size(n)}",
}
_STYLES = {"PASS": "green", "FAIL": "bold red", "INCONCLUSIVE": "yellow"}
SPEEDS = {1: "faster", 0: "no difference", -1: "slower"}
_SPEED_STYLES = {"faster": "green", "slower": "red"}


class Column(NamedTuple):
    """A title, and a function that returns a measurement's cell.

    rank: on a narrow terminal, columns of a higher rank are left out first, and those of rank 0
    never. figure: whether cells are right-aligned and never wrapped. modes, device: the modes and
    the device for which the column is shown; "" is every device.
    """

    title: str
    rank: int
    cell: Callable[[Measurement, Record], str]
    figure: bool = True
    modes: tuple[str, ...] = (*PAIR_MODES, *CACHED)
    device: str = ""

    @property
    def heading(self) -> str:
        """The title on one line."""
        return self.title.replace("\n", " ")


# Decoding one token mostly reads the cache, so it is not compared with a matrix product.
PRODUCTS = (*PAIR_MODES, PREFILL)
COLUMNS = (
    Column("implementation", 0, lambda row, _: row.implementation, figure=False),
    Column("kernel", 5, lambda row, _: row.kernel or words.DASH, figure=False),
    Column("verdict", 0, lambda row, _: row.verdict or words.DASH, figure=False),
    Column("error/\ntorch's", 4, lambda row, _: number(row.error_ratio)),
    Column("time", 0, lambda row, _: words.seconds(row.median_s)),
    Column("dispatch", 3, lambda row, _: words.seconds(row.dispatch_s), device="gpu"),
    Column("speed [95%]", 0, lambda row, _: words.ratio(row.ratio)),
    Column("", 1, lambda row, record: speed(row, record), figure=False),
    Column("tokens/s", 2, lambda row, _: words.digits(row.tokens_per_s), modes=CACHED),
    Column("GFLOP/s", 4, lambda row, _: words.giga(row.flops_per_s), modes=PRODUCTS),
    Column(
        "of\nGEMM",
        2,
        lambda row, record: words.percent(roofline_share(row, record)),
        modes=PRODUCTS,
    ),
    Column("of\nmemory", 2, lambda row, record: words.percent(memory_share(row, record))),
    Column("cache\nGB/s", 3, lambda row, _: words.giga(row.cached_bytes_per_s), modes=(DECODE,)),
    Column("cache\nMiB", 6, lambda row, _: words.mebibytes(row.cache_bytes), modes=CACHED),
    Column("compile", 3, lambda row, _: words.seconds(row.compile_s)),
    Column("compile,\nwarm", 6, lambda row, _: words.seconds(row.warm_compile_s)),
    Column("programs", 6, lambda row, _: words.count(row.programs)),
    Column("first\ncall", 6, lambda row, _: words.seconds(row.first_call_s)),
    Column("peak\nMiB", 3, lambda row, _: words.mebibytes(row.peak_bytes)),
    Column("compiler's\nMiB", 7, lambda row, _: words.mebibytes(row.compiler_bytes)),
)


class Section(NamedTuple):
    """One workload in one mode: the measured rows, the fastest first, and notes.

    notes: (implementation, its status and reason) for each row that has a reason or no time.
    """

    workload: Workload | PairWorkload
    mode: str
    measured: tuple[Measurement, ...]
    notes: tuple[tuple[str, str], ...]

    @property
    def title(self) -> str:
        return f"{self.workload.name}, {self.mode}"

    def about(self, record: Record) -> str:
        judged = words.judged(record, self.workload)
        return "; ".join(filter(None, (words.shape(self.workload), judged)))


def roofline_share(row: Measurement, record: Record) -> float | None:
    """Return achieved FLOP/s over the best of a matrix product in the same run and precision."""
    best = record.roofline.get(row.workload.dtype)
    return row.flops_per_s / best if best and row.flops_per_s else None


def memory_share(row: Measurement, record: Record) -> float | None:
    """Return the bytes that the row reads over those that a sum reads in the same time."""
    best = max(record.settings.get(READS, {}).values(), default=None)
    return row.read_bytes_per_s / best if best and row.read_bytes_per_s else None


def columns(section: Section, record: Record) -> list[Column]:
    devices = ("", record.settings["device"])
    fitting = [c for c in COLUMNS if section.mode in c.modes and c.device in devices]
    # Drop only columns in which no implementation has a value, and never those of rank 0.
    rows = section.measured
    return [c for c in fitting if not c.rank or any(c.cell(r, record) != words.DASH for r in rows)]


def speed(row: Measurement, record: Record) -> str:
    """Return the speed against the baseline in words."""
    if row.implementation == record.settings["baseline"]:
        return "baseline"
    return SPEEDS[row.ratio.side] if row.ratio else words.DASH


def sections(record: Record) -> Iterator[Section]:
    """Yield a section for each workload and mode, in the order in which they ran."""
    for workload, mode in dict.fromkeys((row.workload, row.mode) for row in record.rows):
        rows = [r for r in record.rows if (r.workload, r.mode) == (workload, mode)]
        measured = sorted((r for r in rows if r.seconds), key=lambda r: r.median_s or 0.0)
        notes = tuple(
            (r.implementation, r.reason if r.seconds else f"{r.status}: {r.reason or 'no reason'}")
            for r in rows
            if r.status is not Status.ABSENT and (r.reason or not r.seconds)
        )
        yield Section(workload, mode, tuple(measured), notes)


def absent(record: Record) -> list[tuple[str, str]]:
    """Return (implementation, what installs it) for each one that is absent from the record."""
    reasons = [(r.implementation, r.reason) for r in record.rows if r.status is Status.ABSENT]
    return [(name, f"{Status.ABSENT}: {reason}") for name, reason in dict.fromkeys(reasons)]


# The meaning of columns, by the beginning of their titles.
_LEGEND = {
    "speed": "speed: {baseline}'s median time over this row's, with its bootstrap interval",
    "error/": "error: RMS error against float64, over that of torch",
    "dispatch": "dispatch: time until the call returns, before its result is ready",
    "of GEMM": "of GEMM: useful FLOP/s over those of a matrix product in this run",
    "of memory": "of memory: rate of reading the cache and all parameters except embeddings once, "
    "over the rate of a sum in this run",
    "cache": "cache GB/s: keys and values of the cached tokens, over the time; cache MiB: keys and "
    "values of the cache's whole capacity",
    "compile,": "compile, warm: time to compile again with the compiler's cache on disk",
    "programs": "programs: the number of programs compiled for this row",
    "peak": "peak: memory of the process during a call, beyond what it held before",
    "compiler's": "compiler's: temporaries as the compiler reports them",
}


def legend(record: Record) -> str:
    """Return the meaning of all columns that any of the sections has."""
    shown = [column for section in sections(record) for column in columns(section, record)]
    titles = [column.heading for column in shown]
    meanings = (
        meaning
        for start, meaning in _LEGEND.items()
        if any(title.startswith(start) for title in titles)
    )
    return "; ".join(meanings).format(baseline=record.settings["baseline"])


# --- terminal --------------------------------------------------------------------------------


def terminal(record: Record, width: int) -> Group:
    """Return the record for a rich console of this width.

    It shows the environment, the sections, absent implementations, and compiled programs.
    """
    parts: list[RenderableType] = [Text(line, style="dim") for line in words.place(record)]
    left_out: dict[str, None] = {}
    for section in sections(record):
        parts += [Text(), Text.assemble((section.title, "bold"), f"  {section.about(record)}")]
        if section.measured:
            every, shown = columns(section, record), fitting(section, record, width)
            left_out |= {c.heading: None for c in every if c not in shown}
            parts.append(_table(section, record, shown))
        parts += [Text(f"- {name}: {what}") for name, what in section.notes]
        parts += [Text(f"- {line}") for line in operations.sentences(section.measured)]
    parts += [Text(), *(Text(f"- {name}: {what}") for name, what in absent(record))]
    if record.compiled:
        parts += [Text(), Text(COMPILED, style="bold")]
        parts += [Text(f"- {compiled(item)}") for item in record.compiled]
    if left_out:
        narrow = f"left out on a narrow terminal: {', '.join(filter(None, left_out))}"
        parts += [Text(), Text(f"{narrow}; --markdown, --csv and --json show them", style="dim")]
    return Group(*parts, Text(), Text(legend(record), style="dim"))


def fitting(section: Section, record: Record, width: int) -> list[Column]:
    """Return the columns that fit into the width; those of the highest rank are left out first."""
    shown = columns(section, record)
    # Two characters separate two columns: a space and the gap of the rule.
    taken = {
        column: 2 + max(map(cell_len, [*column.title.split("\n"), *cells]))
        for column in shown
        for cells in [[column.cell(row, record) for row in section.measured]]
    }
    for column in sorted(shown, key=lambda column: -column.rank):
        if column.rank and sum(taken[c] for c in shown) > width:
            shown.remove(column)
    return shown


def _table(section: Section, record: Record, shown: list[Column]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in shown:
        whole = column.figure or not column.title
        justify: JustifyMethod = "right" if column.figure else "left"
        table.add_column(column.title, justify=justify, no_wrap=whole, overflow="fold")
    for row in section.measured:
        cells = (column.cell(row, record) for column in shown)
        styled = [
            Text(cell, style=_STYLES.get(cell) or _SPEED_STYLES.get(cell, "")) for cell in cells
        ]
        table.add_row(*styled, style="bold" if words.is_ours(row.implementation) else "")
    return table


def compiled(item: Mapping[str, Any]) -> str:
    """Format one item of `Record.compiled` in a line."""
    parts = (_COMPILED.get(name, f"{name} {{}}".format)(value) for name, value in item.items())
    return ", ".join(filter(None, parts))


# --- Markdown --------------------------------------------------------------------------------


def markdown(record: Record) -> str:
    """Return the record as Markdown tables, with the same content as `terminal`."""
    lines = ["# Benchmark", "", *(f"- {line}" for line in words.place(record))]
    for section in sections(record):
        lines += ["", f"## {section.title}", "", section.about(record), ""]
        lines += [*_pipes(section, record), ""] if section.measured else []
        lines += [f"- {name}: {what}" for name, what in section.notes]
        lines += [f"- {line}" for line in operations.sentences(section.measured)]
    for title, items in (
        ("Not installed", [f"{name}: {what}" for name, what in absent(record)]),
        (COMPILED, [compiled(item) for item in record.compiled]),
    ):
        lines += ["", f"## {title}", "", *(f"- {item}" for item in items)] if items else []
    lines += ["", legend(record)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _pipes(section: Section, record: Record) -> list[str]:
    shown = columns(section, record)
    rule = ("---:" if column.figure else "---" for column in shown)
    rows = [[column.heading for column in shown], list(rule)]
    rows += [[column.cell(row, record) for column in shown] for row in section.measured]
    return [f"| {' | '.join(row)} |" for row in rows]


# --- CSV -------------------------------------------------------------------------------------

# In units without prefixes.
CSV_COLUMNS: dict[str, Callable[[Measurement, Record], Any]] = {
    "workload": lambda row, _: row.workload.name,
    "dtype": lambda row, _: row.workload.dtype,
    "mode": lambda row, _: row.mode,
    "implementation": lambda row, _: row.implementation,
    "framework": lambda row, _: row.framework,
    "status": lambda row, _: row.status,
    "verdict": lambda row, _: row.verdict,
    "error over torch's": lambda row, _: row.error_ratio,
    "seconds": lambda row, _: row.median_s,
    "speed": lambda row, _: row.ratio and row.ratio.median,
    "speed from": lambda row, _: row.ratio and row.ratio.low,
    "speed to": lambda row, _: row.ratio and row.ratio.high,
    "FLOP/s": lambda row, _: row.flops_per_s,
    "of GEMM": roofline_share,
    "of memory": memory_share,
    "tokens/s": lambda row, _: row.tokens_per_s,
    "dispatch seconds": lambda row, _: row.dispatch_s,
    "compile seconds": lambda row, _: row.compile_s,
    "warm compile seconds": lambda row, _: row.warm_compile_s,
    "programs": lambda row, _: row.programs,
    "first call seconds": lambda row, _: row.first_call_s,
    "peak bytes": lambda row, _: row.peak_bytes,
    "compiler's bytes": lambda row, _: row.compiler_bytes,
    "reason": lambda row, _: row.reason,
}


def csv(record: Record) -> str:
    """Return all measurements as CSV, also those without a time; unknown cells are empty."""
    out = io.StringIO()
    writer = csv_writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    writer.writerows([cell(row, record) for cell in CSV_COLUMNS.values()] for row in record.rows)
    return out.getvalue()
