"""`jax-attn verify --power`: the kill matrix."""

from collections.abc import Sequence
from pathlib import Path

import click

from jax_attn.cli.status import Exit
from jax_attn.cli.verify_modes import NONE_LEFT


def verify_power(
    cases: Sequence, beside: Sequence[str], *, whole: bool, report: Path | None, as_json: bool
) -> Exit:
    """Try every planted bug on every row that claims it, print the matrix; the exit status.

    beside: names of bugs beside those of the matrix, an encoder's and of training. whole: whether
    the cases are all rows, so that one is made for each bug. Writes power.json into `report`.
    """
    from jax_attn import environment
    from jax_attn.cli.outcome import tell
    from jax_attn.cli.progress import tracked
    from jax_attn.parity import process_pool
    from jax_attn.parity.bugs import kill_report
    from jax_attn.parity.bugs.catalogue import BUGS
    from jax_attn.parity.training.bugs import trials

    work = process_pool.power_tasks(cases) + [(trials.kills, (name,)) for name in beside]
    if not work:
        raise click.UsageError(NONE_LEFT)
    blocks = tracked(([block] for block in process_pool.run(work)), len(work))
    kills = [kill for block in blocks for kill in block]
    bugs = [*BUGS, *trials.CASES_OF_BUGS]
    kills.sort(key=lambda kill: (bugs.index(kill.bug), kill.case))
    document = kill_report.as_json(kills, bugs, environment.describe())
    tell(
        document,
        [kill_report.table(kills), *kill_report.summary_lines(kills, bugs, whole)],
        files={"power.json": document},
        report=report,
        as_json=as_json,
    )
    return Exit.PASS if kill_report.passes(kills, bugs, whole) else Exit.FAIL
