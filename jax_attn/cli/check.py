"""`jax-attn check`: a user's own pair, from one file."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from jax_attn.cli.checking.options import OPTIONS, arguments, typed
from jax_attn.cli.checking.request import TIMEOUT, Judged, Request, problems_of_options, refuse
from jax_attn.cli.checking.shown import Forms
from jax_attn.cli.common.outcome import expect_writable
from jax_attn.cli.common.selection import REPORT
from jax_attn.cli.status import Exit, expect_installed
from jax_attn.environment import settle_platforms
from jax_attn.parity.pair.errors import PairError
from jax_attn.report.files import RESULT_FILES


@click.command("check")
@click.pass_context
@click.argument("named", metavar="FILE.py:FUNCTION")
@arguments(OPTIONS)
@click.option(
    "--training",
    is_flag=True,
    help="Check that the port trains as its reference: the function returns a parity.TrainingPair.",
)
@click.option(
    "--explain",
    is_flag=True,
    help="Unless the verdict is PASS, find the first wrong tensor and its cause.",
)
@click.option(
    "--watch",
    is_flag=True,
    help="Check again whenever the file, or a module of yours that it imports, changes, and say "
    "what moved. End with Ctrl-C.",
)
@click.option(
    "--golden",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Judge by the golden reference in this folder, without torch: the function returns the "
    "port, or a parity.Pair with its table and call, whose reference and inputs are None.",
)
@click.option(
    "--expect-digest",
    metavar="DIGEST",
    help="With --golden: refuse a golden reference with another digest, and run the file in a "
    "process of its own, which hands back arrays and cannot change the verdict.",
)
@click.option(
    "--timeout",
    type=click.IntRange(1, 10**7),
    default=TIMEOUT,
    show_default=True,
    metavar="SECONDS",
    help="With --expect-digest: how long the answers of that process may take, all together.",
)
@click.option(
    "--all-tensors", is_flag=True, help="List every tensor, not only the ten worst of many."
)
@REPORT
@click.option("--json", "as_json", is_flag=True, help="Print the whole result as JSON.")
def command(
    context: click.Context,
    named: str,
    training: bool,
    explain: bool,
    watch: bool,
    all_tensors: bool,
    report: Path | None,
    as_json: bool,
    golden: Path | None,
    expect_digest: str | None,
    timeout: int,
    **values: Any,
) -> None:
    """Check that a port computes what its PyTorch reference computes, forward and backward.

    FUNCTION, in a file or as package.module:FUNCTION, needs no arguments. It returns (torch
    module, port, inputs), or a parity.Pair, which also takes a table of weights and the other
    arguments of parity.check. An option wins over the argument in the file. `bench --pair` reads
    the same file.

    The verdict compares outputs and gradients with the reference in float64, within the rounding
    that the dtype allows. All that FUNCTION prints goes to stderr.

    Exit status: 0 for PASS, 1 for FAIL, 2 if the pair cannot be checked, 3 if a package is missing
    or memory runs out, 4 for INCONCLUSIVE.
    """
    given = {
        p.name: p.opts[0]
        for p in context.command.params
        if p.name in OPTIONS and context.get_parameter_source(p.name) is ParameterSource.COMMANDLINE
    }
    problems = problems_of_options(training, given)
    if golden is not None and training:
        problems.append("--training: goes without --golden")
    if expect_digest is not None and explain:
        problems.append(
            "--explain: goes without --expect-digest; run it where the reference is, as jax-attn "
            "check FILE.py:FUNCTION --explain, or without --expect-digest by a golden reference "
            "that jax-attn capture --taps wrote"
        )
    if golden is None and expect_digest is not None:
        problems.append("--expect-digest: goes with --golden")
    source = context.get_parameter_source("timeout")
    if expect_digest is None and source is ParameterSource.COMMANDLINE:
        problems.append("--timeout: goes with --expect-digest")
    if golden is not None and report is not None and _is_within(report, golden):
        problems.append(f"--report: expected a folder outside of --golden, got {report}")
    if watch and as_json:
        problems.append("--json: goes without --watch")
    if problems:
        raise click.UsageError("\n".join(problems))
    if golden is None:
        expect_installed("torch", "is the reference", "torch")
    expect_writable("--report", report, RESULT_FILES)
    settle_platforms()
    if report is not None:  # before a port's process runs, which could write to any file
        for module in ("jax_attn.report.result_files", "jinja2", "encodings.unicode_escape"):
            importlib.import_module(module)
    options = {name: values[name] for name in given}
    words = [*typed(options), *(["--training"] if training else [])]
    words += ["--golden", str(golden)] if golden else []
    words += ["--expect-digest", expect_digest] if expect_digest is not None else []
    words += [] if timeout == TIMEOUT else ["--timeout", str(timeout)]
    request = Request(named, options, training, explain, (*words,), golden, expect_digest, timeout)
    forms = Forms(report, as_json=as_json, all_tensors=all_tensors)
    if watch:
        _watch(request, forms)
    try:
        judged = request.judged()
    except (PairError, MemoryError) as error:
        refuse(error)
    forms.show(judged, request.command)
    if judged.interrupted:
        raise judged.interrupted
    sys.exit(Exit[judged.result.verdict])


def _is_within(folder: Path, other: Path) -> bool:
    return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(other))


def _watch(request: Request, forms: Forms) -> NoReturn:
    """Check after every change of a file, until Ctrl-C."""
    from jax_attn.cli.checking.watch import moved, runs

    imported: set[Path] = set()  # by the port's process, if it has one

    def check() -> Judged | None:
        try:
            judged = request.judged()
        except (PairError, MemoryError) as error:
            click.echo(f"Error: {error}", err=True)
            return None
        if judged.interrupted:
            raise judged.interrupted
        imported.update(judged.files)
        return judged

    last: Judged | None = None
    for judged in runs(request.named, check, further=imported):
        if judged is not None and last is not None:
            forms.show_changes(judged, request.command, moved(last.result, judged.result))
        elif judged is not None:
            forms.show(judged, request.command)
        last = judged or last
        click.echo("waiting for a change; Ctrl-C ends", err=True)
    raise AssertionError("watching never ends by itself")
