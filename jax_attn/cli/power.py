"""`jax-attn power`: plant bugs, and show which rows of the matrix detect which."""

import sys
from pathlib import Path

import click

from jax_attn.cli.common.outcome import tell
from jax_attn.cli.common.selection import (
    AS_JSON,
    DESIGN,
    DTYPE,
    NONE_LEFT,
    PATTERN,
    REPORT,
    expect_ready,
    selected,
)
from jax_attn.cli.status import Exit

FILES = ("power.json",)


@click.command("power")
@DESIGN
@DTYPE
@PATTERN
@REPORT
@AS_JSON
def command(
    designs: tuple[str, ...],
    dtypes: tuple[str, ...],
    pattern: str,
    report: Path | None,
    as_json: bool,
) -> None:
    """Plant bugs in attention, and show which cases detect which.

    No port is run. Every case must detect each bug that it claims to detect. If no case is left
    out, each bug must also be tried both on the case designed for it and on one that `jax-attn
    verify` runs by default. The error of a bug that `verify` does not plant itself must be at least
    10 times the budget in every case. The command exits with status 1 otherwise.
    """
    expect_ready(report, FILES)
    from jax_attn import environment
    from jax_attn.cli.common.progress import worked_off
    from jax_attn.selfcheck import process_pool
    from jax_attn.selfcheck.matrix.rows import matrix
    from jax_attn.selfcheck.power import kill_report
    from jax_attn.selfcheck.power.catalogue import BUGS, WEAK
    from jax_attn.selfcheck.training_bugs import trials
    from jax_attn.selfcheck.training_bugs.trials import CASES_OF_BUGS

    cases = selected(matrix(), designs, dtypes, pattern)
    # Bugs of the encoder and of training; their cases belong to no design.
    beside = [] if designs else trials.selected(dtypes, pattern)
    work = process_pool.power_tasks(cases) + [
        process_pool.Piece(trials.kills, ((name,),)) for name in beside
    ]
    if not work:
        raise click.UsageError(NONE_LEFT)
    kills = list(worked_off(work))
    bugs = [*BUGS, *CASES_OF_BUGS]
    kills.sort(key=lambda kill: (bugs.index(kill.bug), kill.case))
    # Each bug of the encoder and of training has a case of its own, which tries no other bug.
    weak = WEAK | CASES_OF_BUGS.keys()
    whole = not (designs or dtypes or pattern)
    document = kill_report.as_json(kills, bugs, environment.describe())
    tell(
        document,
        [kill_report.table(kills), *kill_report.summary_lines(kills, bugs, weak, whole)],
        files=dict.fromkeys(FILES, document),
        report=report,
        as_json=as_json,
    )
    sys.exit(Exit.PASS if kill_report.passes(kills, bugs, weak, whole) else Exit.FAIL)
