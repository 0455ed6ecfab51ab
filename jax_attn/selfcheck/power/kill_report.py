"""The power of a suite: which of its rows kill which planted bugs, and by how much.

Imports neither framework: it renders what others tried.
"""

import json
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from jax_attn.parity.judge.compare import TensorReport, Verdict
from jax_attn.parity.judge.result import Result
from jax_attn.parity.judge.text import SCHEMA_VERSION, number
from jax_attn.selfcheck.matrix.cases import Case
from jax_attn.selfcheck.matrix.rows import FACTORS, default

FAR = 10.0
"""A bug that `verify` does not try must be this many times over the budget of each row."""


@dataclass(frozen=True)
class Kill:
    """How one row took one bug.

    column: the published design of the row, or what else it is a row of. meant: whether the row is
    the one made to catch it. tensor: which decided, `times` its budget from right; infinitely, of
    another shape or not finite.
    """

    bug: str
    case: str
    column: str
    meant: bool
    killed: bool
    tensor: str
    times: float

    @classmethod
    def of(cls, bug: str, meant: tuple[str, str], case: Case, report: TensorReport) -> "Kill":
        """Of a row of the built-in matrix; meant: its design and mask."""
        return cls(
            bug=bug,
            case="-".join(case.preparation),
            column=case.family,
            meant=(case.design, case.mask, case.dtype) == (*meant, "float32"),
            killed=report.verdict is Verdict.FAIL,
            tensor=report.label,
            times=math.inf if math.isnan(report.fraction) else report.fraction,
        )

    @classmethod
    def of_result(cls, bug: str, case: str, result: Result) -> "Kill":
        """Of a case of its own, beside the matrix: "training/Adam"."""
        worst = result.worst
        return cls(
            bug=bug,
            case=case,
            column=case.partition("/")[0],
            meant=True,
            killed=result.verdict is Verdict.FAIL,
            tensor=worst.label if worst else "; ".join(result.failures),
            times=math.inf if worst is None or math.isnan(worst.fraction) else worst.fraction,
        )


def survivors(kills: Sequence[Kill]) -> list[Kill]:
    """Every bug that a row claims to kill, and did not."""
    return [kill for kill in kills if not kill.killed]


def near_and_untried(kills: Sequence[Kill], weak: Collection[str]) -> list[Kill]:
    """Trials less than `FAR` times over budget, of bugs that `verify` does not try: not `weak`."""
    return [kill for kill in kills if kill.bug not in weak and kill.times < FAR]


def without_their_row(kills: Sequence[Kill], bugs: Sequence[str]) -> list[str]:
    """Bugs that were not tried on the row that is made to catch them."""
    return [name for name in bugs if name not in _meant(kills)]


def without_default_row(kills: Sequence[Kill]) -> list[str]:
    """Bugs that rows of the matrix claim, but no default row of `jax-attn verify`."""
    by_default = {"-".join(case.preparation) for case in default()}
    of_matrix = {kill.bug for kill in kills if _place(kill.column) < len(_families())}
    return sorted(of_matrix - {kill.bug for kill in kills if kill.case in by_default})


def _meant(kills: Sequence[Kill]) -> set[str]:
    """Bugs that were tried on the row made to catch them."""
    return {kill.bug for kill in kills if kill.meant}


def table(kills: Sequence[Kill]) -> Table:
    """The kill matrix: a line a bug, and of each design how many of the rows that claim it kill."""
    by_bug: dict[str, list[Kill]] = defaultdict(list)
    for kill in kills:
        by_bug[kill.bug].append(kill)
    columns = sorted({kill.column for kill in kills}, key=_place)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("planted bug", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("its own case", overflow="fold")
    table.add_column("over budget", justify="right")
    for bug, tried in by_bug.items():
        cells = [_cell([kill for kill in tried if kill.column == column]) for column in columns]
        own = min((kill for kill in tried if kill.meant), key=lambda k: k.times, default=None)
        own_row = ("not among these", "–") if own is None else (own.case, number(own.times, 2))
        table.add_row(bug, *cells, *own_row)
    return table


def _place(column: str) -> int:
    """Designs in the order of the matrix, then all else."""
    families = _families()
    return families.index(column) if column in families else len(families)


def _families() -> list[str]:
    return list(dict.fromkeys(design.partition("/")[0] for design in FACTORS))


def _cell(kills: Sequence[Kill]) -> Text:
    killed = sum(kill.killed for kill in kills)
    style = "green" if killed == len(kills) else "bold red"
    return Text(f"{killed}/{len(kills)}", style) if kills else Text("")


def summary(kills: Sequence[Kill], bugs: Sequence[str]) -> dict[str, Any]:
    """How many bugs were tried and killed, on how many rows, and the weakest kill."""
    alive = {kill.bug for kill in survivors(kills)}
    tried = {kill.bug for kill in kills}
    weakest = min((kill for kill in kills if kill.killed), key=lambda k: k.times, default=None)
    return {
        "bugs": len(bugs),
        "tried": len(tried),
        "killed": len(tried - alive),
        "by_their_own_row": len(_meant(kills) - {k.bug for k in survivors(kills) if k.meant}),
        "rows": len({kill.case for kill in kills}),
        "trials": len(kills),
        "survived": len(survivors(kills)),
        "weakest": None if weakest is None else _plain(weakest),
    }


def passes(kills: Sequence[Kill], bugs: Sequence[str], weak: Collection[str], whole: bool) -> bool:
    """None survived, nor came near without being tried by `verify`.

    Of the whole matrix each was tried, too, on the row made to catch it and on a default row.
    """
    untried = (*without_their_row(kills, bugs), *without_default_row(kills)) if whole else ()
    return not (survivors(kills) or near_and_untried(kills, weak) or untried)


def summary_lines(
    kills: Sequence[Kill], bugs: Sequence[str], weak: Collection[str], whole: bool
) -> list[str]:
    """The summary in words, every survivor, and those that the whole matrix leaves untried."""
    counts = summary(kills, bugs)
    lines = [
        f"{counts['killed']} of {counts['tried']} planted bugs killed by every case that claims "
        f"them ({counts['trials']} trials on {counts['rows']} cases); {counts['by_their_own_row']} "
        "of them by the case designed for them"
    ]
    lines += [
        f"SURVIVED: {kill.bug!r} in {kill.case}: {number(kill.times)} of the budget of "
        f"{kill.tensor}"
        for kill in survivors(kills)
    ]
    lines += [
        f"NEAR: {kill.bug!r} in {kill.case}: {number(kill.times)} times the budget, and `verify` "
        "does not try it: add it to WEAK"
        for kill in near_and_untried(kills, weak)
    ]
    if whole:
        lines += [
            f"NOT TRIED on a case designed for it: {name!r}"
            for name in without_their_row(kills, bugs)
        ]
        lines += [
            f"NOT TRIED on a default case: {name!r}; only `verify --all` would see it"
            for name in without_default_row(kills)
        ] or ["each is tried on a default case of `jax-attn verify`, too"]
    elif more := counts["bugs"] - counts["tried"]:
        lines.append(f"{more} more bugs: no case here claims them")
    if weakest := counts["weakest"]:
        lines.append(
            f"weakest kill: {weakest['bug']!r} in {weakest['case']}, {weakest['tensor']} "
            f"{number(weakest['times'])} times its budget"
        )
    return lines


def as_json(kills: Sequence[Kill], bugs: Sequence[str], environment: dict[str, Any]) -> str:
    """Every trial; `times` is null where it is infinite."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "environment": environment,
        "summary": summary(kills, bugs),
        "kills": [_plain(kill) for kill in kills],
    }
    return json.dumps(document, indent=1, allow_nan=False)


def _plain(kill: Kill) -> dict[str, Any]:
    return asdict(kill) | {"times": kill.times if math.isfinite(kill.times) else None}
