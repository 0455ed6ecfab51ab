"""`jax-attn port`: a checkpoint carried from torch to Flax, or back, and proved."""

import os
import sys
from pathlib import Path
from typing import Literal

import click

from jax_attn.cli.status import expect_installed, refuse
from jax_attn.dtypes import DTYPES
from jax_attn.environment import settle_platforms


@click.command("port")
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--to", type=click.Choice(["flax", "torch"]), required=True, help="What OUT is for.")
@click.option("--layout", "named", metavar="PACKAGE.MODULE:TABLE", help="A Layout of your own.")
@click.option("--num-heads", type=click.IntRange(1), help="Query heads, where no config has them.")
@click.option("--num-kv-heads", type=click.IntRange(1), help="Key/value heads, likewise.")
@click.option("--head-dim", type=click.IntRange(1), help="Features of a head, likewise.")
@click.option(
    "--ignore",
    multiple=True,
    metavar="PATTERN",
    help="Pass over names like this (* and ?); may be repeated.",
)
@click.option("--strip", default="", metavar="PREFIX", help="Strip this prefix from keys.")
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="Cast floating-point tensors; no value may change."
)
@click.option("--lossy", is_flag=True, help="With --dtype: values may be rounded, and overflow.")
@click.option("--allow-nonfinite", is_flag=True, help="Carry NaN and infinity.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "orbax"]),
    default="safetensors",
    show_default=True,
    help="How OUT holds its tensors; torch has safetensors alone.",
)
@click.option("--check", is_flag=True, help="Verify the attention of what was written, too.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--clean", is_flag=True, help="First remove what killed ports to OUT have left.")
@click.option("--json", "as_json", is_flag=True, help="As JSON on stdout.")
def command(
    source: Path,
    target: Path,
    to: Literal["flax", "torch"],
    named: str | None,
    num_heads: int | None,
    num_kv_heads: int | None,
    head_dim: int | None,
    ignore: tuple[str, ...],
    strip: str,
    dtype: str | None,
    lossy: bool,
    allow_nonfinite: bool,
    kind: str,
    check: bool,
    dry_run: bool,
    clean: bool,
    as_json: bool,
) -> None:
    """Carry a checkpoint to the other framework, bit for bit.

    IN: a file, or a folder with its config.json. OUT: a folder that is not there yet. The table is
    the family's, as config.json names it, or --layout. The plan is printed before anything is
    written. What was written is read back, to prove that every byte of IN is carried, passed over
    or tied, and that the way back is identical. OUT gets its name last: a failure leaves nothing,
    and a port that is killed leaves a hidden folder beside OUT, which the next one names.

    Exit status: 1 where the proof or --check fails, or IN changes meanwhile, 2 for input that
    cannot be ported, 3 where torch is needed and absent, 4 where --check shows nothing, 130 where
    it was interrupted, 143 where it was terminated.
    """
    if check:
        expect_installed("torch", "is the reference", "torch")
    for wrong, text in (
        (lossy and dtype is None, "--lossy goes with --dtype"),
        (clean and dry_run, "--clean goes without --dry-run"),
        (kind == "orbax" and to == "torch", "--format orbax goes with --to flax"),
        (check and to == "torch", "--check goes with --to flax; verify OUT looks at torch's side"),
        (not os.path.exists(source), f"IN: expected a file or a folder, got {source}: none there"),
    ):
        if wrong:
            raise click.UsageError(text)

    from jax_attn.cli.port_job import (
        Outcome,
        carry_out,
        imported_layout,
        open_job,
        plan_job,
        tell_leftovers,
    )
    from jax_attn.transfer import TransferError
    from jax_attn.transfer.port.files import refused_target

    layout = None if named is None else imported_layout(named)
    heads = {"--num-heads": num_heads, "--num-kv-heads": num_kv_heads, "--head-dim": head_dim}
    settle_platforms()
    outcome = Outcome()
    try:
        tell_leftovers(target, clean)
        job = open_job(source, to, layout, strip, heads)
        plan = plan_job(job, to, ignore, dtype=dtype, lossy=lossy, allow_nonfinite=allow_nonfinite)
        outcome.family, outcome.plan = job.family, plan
        if not as_json:  # which is one document, at the end
            click.echo(plan)
        if problems := [*job.problems, *plan.problems, *refused_target(target)]:
            raise TransferError("port wrote nothing", problems)
        if not dry_run:
            carry_out(job, plan, target, kind, check, outcome)
    except TransferError as error:
        outcome.problems = error.problems
        outcome.print(as_json)
        refuse(error)
    outcome.print(as_json)
    sys.exit(outcome.status)
