"""`jax-attn bench compare`: whether a run of the bench became slower than another."""

import re
import sys
from pathlib import Path

import click

from jax_attn.cli.status import Exit


class Percent(click.ParamType):
    """`5%`, as a fraction."""

    name = "percent"

    def convert(self, value, param, ctx) -> float:
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
    help="How much slower is a regression.",
)
@click.option("--json", "as_json", is_flag=True, help="As JSON on stdout.")
def command(before: Path, after: Path, threshold: float, as_json: bool) -> None:
    """Compare two runs kept with --output, each row's time over its own run's baseline.

    Exit status: 1 where a row is slower by more than --fail, its whole 95% interval above no
    change, or was measured BEFORE and gives wrong numbers, or fails, AFTER; 2 for what is no
    record; 3 for records of different machines or settings; 4 where nothing could be compared.
    """
    from jax_attn.bench.record import Record
    from jax_attn.bench.results.compare import compare, differences

    try:
        runs = [Record.read(path) for path in (before, after)]
        apart = differences(*runs)
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from error
    if apart:
        for difference in apart:
            click.echo(f"Error: not comparable, {difference}", err=True)
        sys.exit(Exit.ENVIRONMENT)
    found = compare(*runs, threshold)
    if as_json:
        import json

        click.echo(json.dumps(found.as_dict(), indent=1))
    else:
        from jax_attn.bench.results.table import comparison
        from jax_attn.parity.judge.text import console

        console().print(comparison(found))
    if found.regressions or found.broken:
        sys.exit(Exit.FAIL)
    sys.exit(Exit.PASS if found.compared else Exit.INCONCLUSIVE)
