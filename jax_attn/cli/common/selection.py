"""Options that several commands share, and the cases of the built-in matrix that they select."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jax_attn.cli.common.outcome import expect_writable
from jax_attn.cli.status import expect_installed
from jax_attn.dtypes import DTYPES
from jax_attn.environment import settle_platforms

if TYPE_CHECKING:
    from jax_attn.selfcheck.matrix.cases import Case

NONE_LEFT = "no case matches --design, --dtype and -k"
NONE_BY_DEFAULT = f"{NONE_LEFT} among the default rows; --all also runs the others"
DESIGN = click.option(
    "--design", "designs", multiple=True, help="Run only this design; may be repeated."
)
DTYPE = click.option(
    "--dtype", "dtypes", multiple=True, help="Run only this dtype; may be repeated."
)
PATTERN = click.option(
    "-k", "pattern", default="", help="Run only cases whose name contains this text."
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print the whole result as JSON.")
CONFIGURATIONS = click.option(
    "--configurations",
    type=click.IntRange(min=1),
    default=10_000,
    show_default=True,
    help="The number of ports that calibration draws.",
)
SEED = click.option(
    "--seed", type=click.IntRange(min=0), default=0, help="The seed of calibration."
)


class FolderName(click.Path):
    """The name of a folder to write into; an empty one, as of an unset variable, is refused."""

    name = "directory"

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("expected the name of a directory, got an empty one", param, ctx)
        return super().convert(value, param, ctx)


REPORT = click.option(
    "--report",
    type=FolderName(),
    help="Write the results into this directory.",
)


def numbers(context: click.Context, option: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Parse distinct whole numbers with commas between them, as a callback. Raises BadParameter."""
    words = () if value is None else value.split(",")
    found = tuple(int(word) for word in words if word.isascii() and word.strip().isdigit())
    if len(found) < len(words) or len({*found}) < len(found):
        expected = "expected different whole numbers with commas between them, such as 2,5"
        raise click.BadParameter(f"{expected}, got {value!r}")
    return found


def expect_ready(report: Path | None, files: Iterable[str]) -> None:
    """Exit unless torch is installed and `report` is writable; then settle jax's platforms."""
    expect_installed("torch", "is the reference", "torch")
    expect_writable("--report", report, files)
    settle_platforms()


def expect_known(option: str, values: Iterable[str], names: Iterable[str]) -> None:
    """Raise UsageError for values that are not among the names."""
    names = list(names)
    if unknown := sorted(set(values) - set(names)):
        raise click.UsageError(
            f"{option}: expected one of {', '.join(names)}, got {', '.join(unknown)}"
        )


def selected(
    cases: "Sequence[Case]", designs: Sequence[str], dtypes: Sequence[str], pattern: str
) -> "list[Case]":
    """Return the cases that all filters accept. Raises UsageError for unknown designs or dtypes."""
    from jax_attn.selfcheck.matrix.rows import FACTORS

    expect_known("--design", designs, dict.fromkeys(d.partition("/")[0] for d in FACTORS))
    expect_known("--dtype", dtypes, DTYPES)
    return [
        case
        for case in cases
        if (not designs or case.family in designs)
        and (not dtypes or case.dtype in dtypes)
        and pattern in case.name
    ]
