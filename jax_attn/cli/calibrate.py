"""`jax-attn verify --calibrate`: whether the comparison cries wolf."""

from collections.abc import Sequence
from pathlib import Path

from jax_attn.cli.status import Exit


def verify_calibration(
    configurations: Sequence, *, seed: int, report: Path | None, as_json: bool
) -> Exit:
    """Compare correct configurations, print how much of their budgets they meet; the exit status.

    Writes calibration.json into `report`.
    """
    from jax_attn import environment
    from jax_attn.cli.outcome import tell
    from jax_attn.cli.progress import tracked
    from jax_attn.parity import process_pool
    from jax_attn.parity.calibration import report as calibrated

    work = process_pool.calibration_tasks(configurations)
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
        files={"calibration.json": document},
        report=report,
        as_json=as_json,
    )
    return Exit[calibrated.verdict(trials)]
