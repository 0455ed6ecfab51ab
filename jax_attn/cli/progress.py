"""A progress bar on stderr, so that stdout holds data alone."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

T = TypeVar("T")
A_LINE_EVERY = 30.0
"""Seconds, at least, between what a log is told."""


def tracked(batches: Iterable[list[T]], total: int) -> list[T]:
    """Every item of every batch, counted as its batch comes; in a log, by a line now and then."""
    console = Console(stderr=True)
    started = told = time.monotonic()
    columns = (TextColumn("verifying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found: list[T] = []
    in_a_log = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=in_a_log) as progress:
        task = progress.add_task("verifying", total=total)
        for batch in batches:
            found += batch
            done, now = min(len(found), total), time.monotonic()
            progress.update(task, completed=done)
            if in_a_log and now - told >= A_LINE_EVERY:
                told = now
                click.echo(f"verifying: {done} of {total} after {now - started:.0f} s", err=True)
    return found


def counted(steps: Iterable[str], total: int) -> Iterator[str]:
    """Every step as it is done, its words beside the bar; `total` grows where it was too low."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    # Redrawing ten times a second would take a core from whom the steps time.
    shown = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
    with shown as progress:
        task = progress.add_task("starting", total=total)
        for done, step in enumerate(steps, 1):
            known = {"completed": done, "total": max(total, done), "description": step}
            progress.update(task, **known, refresh=True)
            yield step


@contextmanager
def bytes_counted(doing: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes; call what it gives with how many more are done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(doing, total=total)
        yield lambda count: progress.advance(task, count)
