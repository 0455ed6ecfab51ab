"""`jax-attn verify --power`: the kill matrix."""

from collections.abc import Sequence
from pathlib import Path

import click


def verify_power(cases: Sequence, *, report: Path | None, as_json: bool) -> int:
    """Try every planted bug on every row that claims it, print the matrix; the exit status.

    Writes power.json into `report`.
    """
    from jax_attn.cli.progress import tracked
    from jax_attn.cli.verify import FAIL, PASS
    from jax_attn.parity import environment, power, sweep
    from jax_attn.parity import report as reports
    from jax_attn.parity.mutants import MUTANTS

    work = sweep.power_tasks(cases)
    kills = tracked(sweep.run(work), sweep.size(work))
    mutants = list(MUTANTS)
    kills.sort(key=lambda kill: (mutants.index(kill.mutant), kill.case))
    document = power.as_json(kills, mutants, environment.describe())
    if report is not None:
        reports.write(report, {"power.json": document})
    if as_json:
        click.echo(document)
    else:
        console = reports.console()
        console.print(power.table(kills))
        for line in power.summary_lines(kills, mutants):
            console.print(line, highlight=False)
    return FAIL if power.survivors(kills) else PASS
