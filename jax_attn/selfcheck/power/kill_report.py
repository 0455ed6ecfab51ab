"""Report the power of a suite: which of its rows kill which planted bugs, and by how much.

Imports neither framework: it renders the results of trials.
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
"""The least factor over the budget of each row for a bug that `verify` does not try."""


@dataclass(frozen=True)
class Kill:
    """The trial of one bug on one row.

    column: the published design of the row, or another group of rows. meant: whether the row is
    designed to detect the bug. tensor: the one that decided. times: its error over its budget;
    infinite for another shape or a value that is not finite.
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
        """Build a trial on a row of the built-in matrix. meant: the bug's design and mask."""
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
        """Build a trial on a case outside the matrix: "training/Adam"."""
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
    """List every trial in which a row claims to kill a bug, and does not."""
    return [kill for kill in kills if not kill.killed]


def near_and_untried(kills: Sequence[Kill], weak: Collection[str]) -> list[Kill]:
    """List trials below `FAR` times the budget of bugs that `verify` does not try (not `weak`)."""
    return [kill for kill in kills if kill.bug not in weak and kill.times < FAR]


def without_their_row(kills: Sequence[Kill], bugs: Sequence[str]) -> list[str]:
    """List bugs that were not tried on the row designed to detect them."""
    return [name for name in bugs if name not in _meant(kills)]


def without_default_row(kills: Sequence[Kill]) -> list[str]:
    """List bugs that rows of the matrix claim, but no default row of `jax-attn verify`."""
    by_default = {"-".join(case.preparation) for case in default()}
    of_matrix = {kill.bug for kill in kills if _place(kill.column) < len(_families())}
    return sorted(of_matrix - {kill.bug for kill in kills if kill.case in by_default})


def _meant(kills: Sequence[Kill]) -> set[str]:
    """Return the bugs that were tried on the row designed to detect them."""
    return {kill.bug for kill in kills if kill.meant}


def table(kills: Sequence[Kill]) -> Table:
    """Build the kill matrix: by bug and design, how many of the claiming rows kill the bug."""
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
    """Return a column's position: designs in the order of the matrix, then all others."""
    families = _families()
    return families.index(column) if column in families else len(families)


def _families() -> list[str]:
    return list(dict.fromkeys(design.partition("/")[0] for design in FACTORS))


def _cell(kills: Sequence[Kill]) -> Text:
    killed = sum(kill.killed for kill in kills)
    style = "green" if killed == len(kills) else "bold red"
    return Text(f"{killed}/{len(kills)}", style) if kills else Text("")


def summary(kills: Sequence[Kill], bugs: Sequence[str]) -> dict[str, Any]:
    """Count the bugs tried and killed, the rows and the trials; include the weakest kill."""
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
    """Return whether no bug survives, or comes near the budget without being tried by `verify`.

    whole: for the whole matrix, each bug must also be tried on the row designed to detect it and on
    a default row.
    """
    untried = (*without_their_row(kills, bugs), *without_default_row(kills)) if whole else ()
    return not (survivors(kills) or near_and_untried(kills, weak) or untried)


def summary_lines(
    kills: Sequence[Kill], bugs: Sequence[str], weak: Collection[str], whole: bool
) -> list[str]:
    """Return the summary in words, every survivor, and what the whole matrix does not try."""
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
        ] or ["every bug is also tried on a default case of `jax-attn verify`"]
    elif more := counts["bugs"] - counts["tried"]:
        lines.append(f"{more} more bugs: no case here claims them")
    if weakest := counts["weakest"]:
        lines.append(
            f"weakest kill: {weakest['bug']!r} in {weakest['case']}, {weakest['tensor']} "
            f"{number(weakest['times'])} times its budget"
        )
    return lines


def as_json(kills: Sequence[Kill], bugs: Sequence[str], environment: dict[str, Any]) -> str:
    """Return every trial as JSON; `times` is null if it is infinite."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "environment": environment,
        "summary": summary(kills, bugs),
        "kills": [_plain(kill) for kill in kills],
    }
    return json.dumps(document, indent=1, allow_nan=False)


def _plain(kill: Kill) -> dict[str, Any]:
    return asdict(kill) | {"times": kill.times if math.isfinite(kill.times) else None}
