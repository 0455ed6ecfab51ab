"""Write the outcome of a command to files, then print it on stdout."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click


def expect_writable(option: str, directory: Path | None, names: Iterable[str]) -> None:
    """Raise UsageError if files of these names cannot be written into the directory."""
    from jax_attn.report.files import why_not_writable

    if directory is not None and (why := why_not_writable(directory, names)):
        raise click.UsageError(
            f"{option}: expected a directory to write to, got {directory}: {why}"
        )


def tell(
    document: str,
    shown: Iterable[Any],
    *,
    files: dict[str, str],
    report: Path | None,
    as_json: bool,
) -> None:
    """Write `files` (name → text) into the folder `report`, if given; then print the outcome.

    document: JSON, printed with --json. shown: lines and tables, printed otherwise.
    """
    from jax_attn.parity.judge.text import console
    from jax_attn.report.files import write

    if report is not None:
        write(report, files)
    if as_json:
        click.echo(document)
        return
    terminal = console()
    for part in shown:
        terminal.print(part, highlight=False)
