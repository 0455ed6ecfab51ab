"""`jax-attn port`: a checkpoint carried from torch to Flax, or back, and proved."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from jax_attn.cli.port_job import Job, imported, prepared
from jax_attn.cli.status import Exit, WrongInput, expect_installed, missing
from jax_attn.dtypes import DTYPES
from jax_attn.environment import settle_platforms


@click.command("port")
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--to", type=click.Choice(["flax", "torch"]), required=True, help="What OUT is for.")
@click.option("--layout", "named", metavar="PACKAGE.MODULE:TABLE", help="A Layout of your own.")
@click.option("--num-heads", type=click.IntRange(1), help="Query heads, where no config says.")
@click.option("--num-kv-heads", type=click.IntRange(1), help="Key/value heads, likewise.")
@click.option("--head-dim", type=click.IntRange(1), help="Features of a head, likewise.")
@click.option(
    "--ignore",
    multiple=True,
    metavar="PATTERN",
    help="Pass over names like this (* and ?); may be repeated.",
)
@click.option("--strip", default="", metavar="PREFIX", help="Take this from the front of keys.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Cast floating numbers, losing nothing.")
@click.option("--lossy", is_flag=True, help="With --dtype: round, and overflow.")
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
@click.option("--json", "as_json", is_flag=True, help="As JSON on stdout.")
def command(
    source: Path,
    target: Path,
    to: str,
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
    as_json: bool,
) -> None:
    """Carry a checkpoint to the other framework, bit for bit.

    IN: a file, or a folder with its config.json. OUT: a folder that is not there yet. The table is
    the family's, as config.json names it, or --layout. First the plan, printed; then the write;
    then a second reading that proves every byte of IN carried, passed over or tied, and the way
    back identical. OUT gets its name when all that is done: a failure leaves nothing.

    Exit status: 1 where the proof or --check fails, or IN changes meanwhile, 2 for input that
    cannot be ported, 3 where torch is needed and absent, 4 where --check shows nothing, 130 where
    it was interrupted, 143 where it was terminated.
    """
    if check:
        expect_installed("torch", "is the reference", "torch")
    for wrong, text in (
        (lossy and dtype is None, "--lossy goes with --dtype"),
        (kind == "orbax" and to == "torch", "--format orbax goes with --to flax"),
        (check and to == "torch", "--check goes with --to flax; verify OUT looks at torch's side"),
        (not os.path.exists(source), f"IN: expected a file or a folder, got {source}: none there"),
    ):
        if wrong:
            raise click.UsageError(text)
    layout = None if named is None else imported(named)
    settle_platforms()
    heads = {"--num-heads": num_heads, "--num-kv-heads": num_kv_heads, "--head-dim": head_dim}
    values = {"dtype": dtype, "lossy": lossy, "allow_nonfinite": allow_nonfinite}

    from jax_attn.transfer import TransferError

    document: dict[str, Any] = {}
    try:
        job = prepared(source, to, layout, strip, heads)
        said = _silent if as_json else click.echo
        options = (kind, ignore, values, check, dry_run)
        status = _carried_out(job, source, target, *options, said, document)
    except TransferError as error:
        document["problems"] = [problem._asdict() for problem in error.problems]
        _say(document, as_json)
        if any("pip install" in problem.hint for problem in error.problems):
            missing(str(error))
        raise WrongInput(str(error)) from error
    _say(document, as_json)
    sys.exit(status)


class _FailedError(Exception):
    """What was written is not what it should be."""


def _carried_out(
    job: Job,
    source: Path,
    target: Path,
    kind: str,
    ignore: tuple[str, ...],
    values: Mapping[str, Any],
    check: bool,
    dry_run: bool,
    said: Callable[[Any], None],
    document: dict[str, Any],
) -> Exit:
    """Plan, write, prove; the exit status. What is found goes into `document` as it is found.

    said: told the plan before anything is written.
    """
    from jax_attn.cli.progress import bytes_counted
    from jax_attn.transfer import TransferError
    from jax_attn.transfer.arrays import specs
    from jax_attn.transfer.files.changed_files import changed
    from jax_attn.transfer.port.carry_and_prove import Carried, prove
    from jax_attn.transfer.port.files import read_again, refused_target, staged, unfinished, write
    from jax_attn.transfer.port.plan import plan_port

    total = sum(spec.nbytes for spec in specs(job.tensors)[0].values())
    with bytes_counted("looking", total) as looked_at:
        port = plan_port(
            job.tensors, job.table, job.to, ignore=ignore, looked_at=looked_at, **values
        )
    document |= {"family": job.family, "plan": port}
    said(port)
    if problems := [*job.problems, *port.problems, *refused_target(target)]:
        raise TransferError("port, nothing written", problems)
    if dry_run:
        return Exit.PASS
    if left := unfinished(target):
        text = f"beside {target}, of a port that was killed or is at work: {', '.join(left)}"
        click.echo(text, err=True)
    keys = [key for move in port.moves for key in move.row.keys]
    record = {"to": job.to, "family": job.family, "keys": keys, "passed_over": port.passed_over}
    status = Exit.PASS
    try:
        with staged(target) as folder:
            with bytes_counted("writing", total) as looked_at:
                carried = Carried(port, job.tensors, looked_at)
                write(folder, carried, kind, record, source, port.dtype)
            written = read_again(folder)
            with bytes_counted("proving", total) as looked_at:
                proof = prove(port, job.tensors, written, looked_at)
            proof = proof._replace(problems=[*proof.problems, *changed(job.stamps)])
            document["proof"] = proof
            if proof.problems:
                raise _FailedError
            if check:
                status = _checked(job, port, written, document)
            if status == Exit.FAIL:
                raise _FailedError
    except _FailedError:
        return Exit.FAIL
    document["written"] = str(target)
    return status


def _checked(job: Job, port: Any, written: Mapping[str, Any], document: dict[str, Any]) -> Exit:
    """Verify the attention of what was written."""
    from jax_attn.cli.progress import tracked
    from jax_attn.parity.checkpoint.verify_port import survey_port, verify_port
    from jax_attn.parity.judge.compare import Verdict

    found = survey_port(job.tensors, job.config, port, job.table.sizes)
    verified = ([verify_port(item, job.tensors, written, port)] for item in found)
    results = tracked(verified, len(found))
    document["check"] = results
    return Exit[Verdict.worst(result.verdict for result in results)]


def _silent(_: Any) -> None:
    """JSON is one document, at the end."""


def _say(document: dict[str, Any], as_json: bool) -> None:
    """What is known so far, on stdout; but for the plan, which people were told before."""
    if as_json:
        import json

        from jax_attn import environment
        from jax_attn.report import results as report

        plain = dict(document)
        if "plan" in plain:
            plain["plan"] = plain["plan"].as_dict()
        if "proof" in plain:
            plain["proof"] = plain["proof"].as_dict()
        if "check" in plain:
            plain["check"] = json.loads(report.as_json(plain["check"], environment.describe(), []))
        click.echo(json.dumps(plain, indent=1))
        return
    if "check" in document:
        from jax_attn.parity.judge.text import console
        from jax_attn.report.results import cases_table

        console().print(cases_table(document["check"]))
        for result in document["check"]:
            if result.reasons:
                console().print(f"{result.name}: {'; '.join(map(str, result.reasons))}")
    if "proof" in document:
        for problem in document["proof"].problems:
            click.echo(problem)
        click.echo(document["proof"])
    if "written" in document:
        click.echo(f"written: {document['written']}")
    elif "proof" in document:
        click.echo("nothing kept")
