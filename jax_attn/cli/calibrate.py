"""`jax-attn calibrate`: how often a verdict fails a port that is correct."""

import sys
from pathlib import Path

import click

from jax_attn.cli.common.outcome import tell
from jax_attn.cli.common.selection import (
    AS_JSON,
    CONFIGURATIONS,
    DTYPE,
    NONE_LEFT,
    PATTERN,
    REPORT,
    SEED,
    expect_known,
    expect_ready,
)
from jax_attn.cli.status import Exit
from jax_attn.dtypes import DTYPES

FILES = ("calibration.json",)


@click.command("calibrate")
@CONFIGURATIONS
@SEED
@DTYPE
@PATTERN
@REPORT
@AS_JSON
def command(
    configurations: int,
    seed: int,
    dtypes: tuple[str, ...],
    pattern: str,
    report: Path | None,
    as_json: bool,
) -> None:
    """Measure the false-alarm rate on random correct ports.

    Exits with status 1 if any of them fails, and with 4 if more than a tenth are inconclusive.
    """
    expect_ready(report, FILES)
    from jax_attn import environment
    from jax_attn.cli.common.progress import tracked
    from jax_attn.parity import process_pool
    from jax_attn.parity.calibration import report as calibrated
    from jax_attn.parity.calibration.configurations import configurations as draw

    expect_known("--dtype", dtypes, DTYPES)
    work = process_pool.calibration_tasks(draw(configurations, seed, dtypes, pattern))
    if not work:
        raise click.UsageError(NONE_LEFT)
    trials = tracked(process_pool.run(work), process_pool.size(work))
    trials.sort(key=lambda trial: trial.number)
    document = calibrated.as_json(trials, seed, environment.describe())
    tell(
        document,
        [
            calibrated.table(trials),
            calibrated.power_table(trials),
            *calibrated.summary_lines(trials, seed),
        ],
        files=dict.fromkeys(FILES, document),
        report=report,
        as_json=as_json,
    )
    sys.exit(Exit[calibrated.verdict(trials)])
