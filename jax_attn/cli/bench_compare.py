"""`jax-attn bench compare`: tell whether one run of the bench is slower than another."""

import re
import sys
from pathlib import Path
from typing import Any

import click

from jax_attn.cli.status import Exit


class Percent(click.ParamType):
    """A percentage, such as `5%`, converted to a fraction."""

    name = "percent"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if not re.fullmatch(r"\d+(\.\d+)?%", value):
            self.fail(f"expected a percentage like 5%, got {value!r}", param, ctx)
        return float(value[:-1]) / 100


@click.command("compare")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option(
    "--fail",
    "threshold",
    type=Percent(),
    default="5%",
    show_default=True,
    help="Fail if a time grew by more than this.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def command(before: Path, after: Path, threshold: float, as_json: bool) -> None:
    """Compare two runs kept with --output.

    Each time is first divided by the time of the same run's baseline.

    Exit status: 1 if a time grew by more than --fail and its whole 95% interval shows growth, or if
    an implementation that BEFORE measured is excluded or fails in AFTER; 2 if a file is not a
    record; 3 if machines or settings differ; 4 if nothing could be compared.
    """
    from jax_attn.bench.record import Record
    from jax_attn.bench.results.compare import compare, comparison_table, differences

    try:
        before_run, after_run = Record.read(before), Record.read(after)
        problems = differences(before_run, after_run)
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from error
    if problems:
        for problem in problems:
            click.echo(f"Error: not comparable, {problem}", err=True)
        sys.exit(Exit.ENVIRONMENT)
    comparison = compare(before_run, after_run, threshold)
    if as_json:
        import json

        click.echo(json.dumps(comparison.as_dict(), indent=1))
    else:
        from jax_attn.parity.judge.text import console

        out = console()
        out.print(comparison_table(comparison, out.width))
    if comparison.regressions or comparison.broken:
        sys.exit(Exit.FAIL)
    sys.exit(Exit.PASS if comparison.compared else Exit.INCONCLUSIVE)
