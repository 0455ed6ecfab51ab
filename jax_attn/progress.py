"""How far a long run is, on stderr, so that stdout holds only data."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

A_LINE_EVERY = 30.0
"""The least seconds between two lines of a log."""


@contextmanager
def counting(activity: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar, or a line now and then if stderr is a log; call the function it yields with how many
    are done.

    What is printed on stdout meanwhile stands above the bar, where both are one terminal.
    """
    console = Console(stderr=True)
    started = logged = time.monotonic()
    columns = (
        TextColumn(activity),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    in_a_log = not console.is_terminal
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=in_a_log,
        redirect_stdout=sys.stdout.isatty(),
    ) as progress:
        task = progress.add_task(activity, total=total)

        def show(done: int) -> None:
            nonlocal logged
            now = time.monotonic()
            progress.update(task, completed=done)
            if in_a_log and now - logged >= A_LINE_EVERY:
                logged, took = now, now - started
                left = took / max(done, 1) * (total - done)
                line = f"{activity}: {done} of {total} after {took:.0f} s, about {left:.0f} s left"
                print(line, file=sys.stderr, flush=True)

        yield show
