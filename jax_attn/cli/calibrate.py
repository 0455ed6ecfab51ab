"""`jax-attn verify --calibrate`: whether the comparison cries wolf."""

from collections.abc import Sequence
from pathlib import Path

import click


def verify_calibration(
    configurations: Sequence, *, seed: int, report: Path | None, as_json: bool
) -> int:
    """Compare correct configurations, print how much of their budgets they meet; the exit status.

    Writes calibration.json into `report`.
    """
    from jax_attn.cli.progress import tracked
    from jax_attn.cli.verify import FAIL, PASS
    from jax_attn.parity import calibrated, environment, sweep
    from jax_attn.parity import report as reports

    work = sweep.calibration_tasks(configurations)
    trials = tracked(sweep.run(work), sweep.size(work))
    trials.sort(key=lambda trial: trial.number)
    document = calibrated.as_json(trials, seed, environment.describe())
    if report is not None:
        reports.write(report, {"calibration.json": document})
    if as_json:
        click.echo(document)
    else:
        console = reports.console()
        console.print(calibrated.table(trials))
        console.print(calibrated.power_table(trials))
        for line in calibrated.summary_lines(trials, seed):
            console.print(line, highlight=False)
    return PASS if calibrated.passes(trials) else FAIL
