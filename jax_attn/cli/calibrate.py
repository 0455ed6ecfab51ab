"""`jax-attn calibrate`: measure how often a correct port fails."""

import sys
from dataclasses import replace
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

    A port that is inconclusive is judged again in a finer precision, which removes the usual
    cause. The command exits with status 1 if any port fails, and with 4 if more than a tenth are
    inconclusive, or if one remains inconclusive in the finer precision.
    """
    expect_ready(report, FILES)
    from jax_attn import environment
    from jax_attn.cli.common.progress import worked_off
    from jax_attn.parity.judge.compare import Verdict
    from jax_attn.selfcheck import process_pool
    from jax_attn.selfcheck.calibration import report as calibrated
    from jax_attn.selfcheck.calibration.configurations import Configuration
    from jax_attn.selfcheck.calibration.configurations import configurations as draw
    from jax_attn.selfcheck.calibration.report import PortTrial

    expect_known("--dtype", dtypes, DTYPES)
    drawn = draw(configurations, seed, dtypes, pattern)
    if not drawn:
        raise click.UsageError(NONE_LEFT)

    def judged(chosen: list[Configuration]) -> list[PortTrial]:
        return list(worked_off(process_pool.calibration_tasks(chosen)))

    trials = sorted(judged(drawn), key=lambda trial: trial.number)
    doubted = {t.number for t in trials if t.verdict is Verdict.INCONCLUSIVE}
    again = judged([replace(c, without_cause=True) for c in drawn if c.number in doubted])
    verdicts = {trial.number: trial.verdict for trial in again}
    trials = [replace(t, without_cause=verdicts.get(t.number)) for t in trials]
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
