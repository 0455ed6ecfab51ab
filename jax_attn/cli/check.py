"""`jax-attn check`: a user's own pair, from one file."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from jax_attn.cli.checking.request import Request, leave_for_missing, problems_of_options
from jax_attn.cli.checking.shown import Forms
from jax_attn.cli.common.outcome import expect_writable
from jax_attn.cli.common.selection import REPORT
from jax_attn.cli.status import Exit, WrongInput, expect_installed, missing
from jax_attn.dtypes import DTYPES
from jax_attn.environment import settle_platforms
from jax_attn.parity.pair.errors import MissingModuleError, PairError
from jax_attn.parity.run import TRANSFORMS
from jax_attn.report.files import RESULT_FILES

if TYPE_CHECKING:
    from jax_attn.parity.judge.result import Result


def _words(context: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Parse names with commas between them, as a callback."""
    names = tuple((value or "").split(",")) if value else ()
    if unknown := [name for name in names if name not in TRANSFORMS]:
        expected = f"expected some of {', '.join(TRANSFORMS)}, with commas between them"
        raise click.BadParameter(f"{expected}, got {', '.join(unknown)}")
    return names


OPTIONS = {
    # argument of check or check_training -> the option that gives it
    "dtype": click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        help="The dtype of both modules. The function takes it as its argument `dtype`, if it has "
        "one. The default is the reference's.",
    ),
    "gradients": click.option(
        "--gradients/--no-gradients", default=None, help="Whether to compare gradients."
    ),
    "transforms": click.option(
        "--transforms",
        metavar="eager,jit,...",
        callback=_words,
        help=f"Run the port under these: {', '.join(TRANSFORMS)}.",
    ),
    "seed": click.option("--seed", type=click.IntRange(min=0), help="The seed of the cotangents."),
    "strict": click.option(
        "--strict/--no-strict", default=None, help="Whether notes make the verdict INCONCLUSIVE."
    ),
    "parameters": click.option(
        "--parameters",
        multiple=True,
        metavar="PATTERN",
        help="Compare only the gradients of parameters whose names in the reference match (* is "
        "any text); may be repeated.",
    ),
    "steps": click.option(
        "--steps", type=click.IntRange(min=1), help="With --training: the number of updates."
    ),
}


def _arguments(command: Any) -> Any:
    for option in reversed(OPTIONS.values()):
        command = option(command)
    return command


@click.command("check")
@click.pass_context
@click.argument("named", metavar="FILE.py:FUNCTION")
@_arguments
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
    **arguments: Any,
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
    if watch and as_json:
        problems.append("--json: goes without --watch")
    if problems:
        raise click.UsageError("\n".join(problems))
    expect_installed("torch", "is the reference", "torch")
    expect_writable("--report", report, RESULT_FILES)
    settle_platforms()
    options = {name: arguments[name] for name in given}
    typed = (*_typed(options), *(["--training"] if training else []))
    request = Request(named, options, training, explain, typed)
    forms = Forms(report, as_json=as_json, all_tensors=all_tensors)
    if watch:
        _watch(request, forms)
    try:
        result, interrupted = request.judged()
    except (PairError, MemoryError) as error:
        _refuse(error)
    forms.show(result, request.command)
    if interrupted:
        raise interrupted
    sys.exit(Exit[result.verdict])


def _typed(options: dict[str, Any]) -> Iterator[str]:
    """Yield the words that give these options on the command line."""
    for name, value in options.items():
        if isinstance(value, bool):
            yield f"--{'' if value else 'no-'}{name}"
        elif name == "parameters":
            yield from (word for pattern in value for word in (f"--{name}", pattern))
        else:
            yield from (f"--{name}", ",".join(value) if name == "transforms" else str(value))


def _refuse(error: PairError | MemoryError) -> NoReturn:
    if isinstance(error, MissingModuleError):
        leave_for_missing(error)
    if isinstance(error, MemoryError):
        missing(f"{error}; --parameters and --no-gradients need less")
    raise WrongInput(str(error)) from error


def _watch(request: Request, forms: Forms) -> NoReturn:
    """Check after every change of a file, until Ctrl-C."""
    from jax_attn.cli.checking.watch import moved, runs

    def check() -> "Result | None":
        try:
            result, interrupted = request.judged()
        except (PairError, MemoryError) as error:
            click.echo(f"Error: {error}", err=True)
            return None
        if interrupted:
            raise interrupted
        return result

    last: Result | None = None
    for result in runs(request.named, check):
        if result is not None and last is not None:
            forms.show_changes(result, request.command, moved(last, result))
        elif result is not None:
            forms.show(result, request.command)
        last = result or last
        click.echo("waiting for a change; Ctrl-C ends", err=True)
    raise AssertionError("watching never ends by itself")
