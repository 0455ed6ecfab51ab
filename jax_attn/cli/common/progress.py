"""Progress bars on stderr, so that stdout holds only data."""

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
"""The least seconds between two lines of a log."""


def tracked(batches: Iterable[list[T]], total: int) -> list[T]:
    """All items, counted batch by batch on a bar, or by a line now and then if stderr is a log."""
    console = Console(stderr=True)
    started = logged = time.monotonic()
    columns = (TextColumn("verifying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    items: list[T] = []
    in_a_log = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=in_a_log) as progress:
        task = progress.add_task("verifying", total=total)
        for batch in batches:
            items += batch
            done, now = min(len(items), total), time.monotonic()
            progress.update(task, completed=done)
            if in_a_log and now - logged >= A_LINE_EVERY:
                logged = now
                click.echo(f"verifying: {done} of {total} after {now - started:.0f} s", err=True)
    return items


def counted(steps: Iterable[str], total: int) -> Iterator[str]:
    """Yield each step as it is done, named beside the bar; `total` grows if it was too low."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    # A thread that redraws ten times a second would disturb what the steps time.
    bar = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
    with bar as progress:
        task = progress.add_task("starting", total=total)
        for done, step in enumerate(steps, 1):
            progress.update(
                task, completed=done, total=max(total, done), description=step, refresh=True
            )
            yield step


@contextmanager
def bytes_counted(activity: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes; call the function it yields with how many more are done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(activity, total=total)
        yield lambda count: progress.advance(task, count)
