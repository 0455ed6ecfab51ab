"""`jax-attn verify`: the built-in matrix, or the attention layers of a checkpoint."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jax_attn.cli import calibrate as calibrate_command
from jax_attn.cli import power as power_command
from jax_attn.cli.common import devices
from jax_attn.cli.common.outcome import tell
from jax_attn.cli.common.selection import (
    AS_JSON,
    CONFIGURATIONS,
    DESIGN,
    DTYPE,
    PATTERN,
    REPORT,
    SEED,
    expect_ready,
)
from jax_attn.cli.status import Exit
from jax_attn.cli.verify_checkpoint import expect_torch_side, verify_checkpoint
from jax_attn.cli.verify_matrix import verify_matrix
from jax_attn.cli.verify_modes import expect_one_mode
from jax_attn.report.files import RESULT_FILES

if TYPE_CHECKING:
    from jax_attn.parity.judge.result import NotRun, Result

BACKENDS = (*devices.KINDS, "all")


@click.command("verify")
@click.pass_context
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@DESIGN
@DTYPE
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="all",
    show_default=True,
    help="Where the port runs; all: wherever it can here.",
)
@click.option("--implementation", help="The attention kernel to insist on; chosen unless given.")
@PATTERN
@REPORT
@AS_JSON
@click.option("--all-tensors", is_flag=True, help="List every tensor of what does not pass.")
@click.option("--power", is_flag=True, help="The same as `jax-attn power`.")
@click.option("--calibrate", is_flag=True, help="The same as `jax-attn calibrate`.")
@CONFIGURATIONS
@SEED
@click.option("--num-heads", type=int, help="Query heads, where no config beside says.")
@click.option("--num-kv-heads", type=int, help="Key/value heads, where no config beside says.")
def command(
    context: click.Context,
    checkpoint: Path | None,
    designs: tuple[str, ...],
    dtypes: tuple[str, ...],
    backend: str,
    implementation: str | None,
    pattern: str,
    report: Path | None,
    as_json: bool,
    all_tensors: bool,
    power: bool,
    calibrate: bool,
    configurations: int,
    seed: int,
    num_heads: int | None,
    num_kv_heads: int | None,
) -> None:
    """Verify that port and reference agree.

    Without CHECKPOINT: every published design, in both frameworks, against a float64 oracle.
    With one (a safetensors or torch file, or a folder of shards): the attention layers found in
    it, each rebuilt in torch and in Flax and compared on seeded inputs.
    """
    expect_one_mode(context)
    shared = {"dtypes": dtypes, "pattern": pattern, "report": report, "as_json": as_json}
    if power:
        context.invoke(power_command.command, designs=designs, **shared)
    if calibrate:
        drawn = {"configurations": configurations, "seed": seed}
        context.invoke(calibrate_command.command, **drawn, **shared)
    if checkpoint:
        expect_torch_side(checkpoint)
    expect_ready(report, RESULT_FILES)
    if checkpoint:
        outcome = verify_checkpoint(checkpoint, num_heads, num_kv_heads)
    else:
        outcome = verify_matrix(designs, dtypes, backend, pattern, implementation)
    sys.exit(present_outcome(*outcome, report=report, as_json=as_json, all_tensors=all_tensors))


def present_outcome(
    results: "Sequence[Result]",
    not_run: "Sequence[NotRun]",
    *,
    report: Path | None,
    as_json: bool,
    all_tensors: bool,
) -> Exit:
    """Print, write, and return the exit status."""
    from jax_attn import environment
    from jax_attn.parity.judge.compare import Verdict
    from jax_attn.report.documents import cases_table, compiled_table, result_files, summary_lines

    files = result_files(results, environment.describe(), not_run)
    tell(
        files["result.json"],
        [
            cases_table(results),
            *([compiled_table(not_run)] if not_run else []),
            *(r.report(all_tensors=all_tensors) for r in results if r.verdict is not Verdict.PASS),
            *summary_lines(results, not_run),
        ],
        files=files,
        report=report,
        as_json=as_json,
    )
    if any(item.level == "failed" for item in not_run):
        return Exit.FAIL
    return Exit[Verdict.worst(r.verdict for r in results)]
