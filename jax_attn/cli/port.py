"""`jax-attn port`: carry a checkpoint from torch to Flax, or back, and prove the result."""

import sys
from pathlib import Path
from typing import Literal

import click

from jax_attn.cli.common.held import Held, held_options
from jax_attn.cli.status import expect_installed, refuse
from jax_attn.cli.verifying.checkpoint import expect_there
from jax_attn.dtypes import DTYPES
from jax_attn.environment import settle_platforms


@click.command("port")
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--to", type=click.Choice(["flax", "torch"]), required=True, help="The framework of OUT."
)
@click.option(
    "--layout", "named", metavar="PACKAGE.MODULE:TABLE", help="Use your own transfer.Layout."
)
@click.option(
    "--num-heads",
    type=click.IntRange(1),
    help="The number of query heads, if config.json does not give it.",
)
@click.option(
    "--num-kv-heads",
    type=click.IntRange(1),
    help="The number of key/value heads, if config.json does not give it.",
)
@click.option(
    "--head-dim",
    type=click.IntRange(1),
    help="The number of features per head, if config.json does not give it.",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="PATTERN",
    help="Skip tensors whose names match (* is any text, ? any character); may be repeated.",
)
@held_options
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Cast floating-point tensors to this dtype. It is an error if a value changes.",
)
@click.option("--lossy", is_flag=True, help="Let --dtype round values, and let them overflow.")
@click.option(
    "--allow-nonfinite", is_flag=True, help="Carry NaN and infinity, which are errors otherwise."
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "orbax"]),
    default="safetensors",
    show_default=True,
    help="The format of OUT; --to torch supports only safetensors.",
)
@click.option(
    "--check", is_flag=True, help="Also compare the written attention layers with torch's."
)
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option(
    "--clean",
    is_flag=True,
    help="First remove the hidden folders that killed ports to OUT have left.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def command(
    source: Path,
    target: Path,
    to: Literal["flax", "torch"],
    named: str | None,
    num_heads: int | None,
    num_kv_heads: int | None,
    head_dim: int | None,
    ignore: tuple[str, ...],
    part: str | None,
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

    IN is a file, or a folder with its config.json. OUT is a folder that does not exist yet. Names
    and shapes are translated by the table of the family that config.json names, or by --layout.

    The plan is printed before anything is written. The written files are read back to prove that
    every byte of IN is carried, skipped or tied, and that porting back gives identical bits.
    OUT is given its name last, so that a failure leaves no files. A port that is killed leaves a
    hidden folder next to OUT; the next port to OUT reports it.

    Exit status: 1 if the proof or --check fails, or if IN changes during the port; 2 if IN cannot
    be ported; 3 if torch is needed but not installed; 4 if --check is inconclusive; 130 if the
    command is interrupted; 143 if it is terminated.
    """
    if check:
        expect_installed("torch", "is the reference", "torch")
    for wrong, text in (
        (lossy and dtype is None, "--lossy needs --dtype"),
        (clean and dry_run, "--clean cannot be combined with --dry-run"),
        (kind == "orbax" and to == "torch", "--format orbax needs --to flax"),
        (part is not None and to == "torch", "--part needs --to flax"),
        (check and to == "torch", "--check needs --to flax; to check OUT, run jax-attn verify OUT"),
    ):
        if wrong:
            raise click.UsageError(text)
    expect_there("IN", source)

    from jax_attn.cli.port_job import (
        PortOutcome,
        carry_out,
        imported_layout,
        open_job,
        plan_job,
        tell_leftovers,
    )
    from jax_attn.transfer import TransferError
    from jax_attn.transfer.files.port_folder import refused_target

    layout = None if named is None else imported_layout(named)
    heads = {"--num-heads": num_heads, "--num-kv-heads": num_kv_heads, "--head-dim": head_dim}
    settle_platforms()
    outcome = PortOutcome()
    try:
        tell_leftovers(target, clean)
        job = open_job(source, to, layout, Held(part, strip), heads)
        plan = plan_job(job, to, ignore, dtype=dtype, lossy=lossy, allow_nonfinite=allow_nonfinite)
        outcome.family, outcome.plan = job.family, plan
        if not as_json:  # JSON is one document, printed at the end
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
