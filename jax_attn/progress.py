"""Progress of a long run, shown on stderr so that stdout holds only data."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

A_LINE_EVERY = 30.0
"""Minimum number of seconds between two lines of a log."""
_KNOWN_FROM = 0.1
"""Fraction of the work that must be done before the time left is shown."""
_LEAST_PARTS = 5
"""Parts of the work that must be done before: the first ones load, and two may end at once."""
_SOON, _AT_MOST = 20.0, 30.0
"""With fewer than _SOON seconds left, show "less than _AT_MOST", because one part may take long."""


class TimeLeft:
    """Estimate of the remaining time of some work, from the cost of what is done.

    The clock starts when the first part is done: until then processes start and programs load.
    """

    def __init__(self, cost: float):
        self.cost = cost
        self._parts = 0
        self._first = self._last = (0.0, 0.0)

    def done(self, cost: float) -> None:
        """Record that work of this total cost is done by now."""
        self._last = (time.monotonic(), cost)
        if self._parts == 0:
            self._first = self._last
        self._parts += 1

    @property
    def seconds(self) -> float | None:
        """Estimated seconds left from now on; None if they are not yet known."""
        (begun, before), (then, cost) = self._first, self._last
        if self._parts < _LEAST_PARTS or cost < _KNOWN_FROM * self.cost or cost <= before:
            return None
        left = (then - begun) / (cost - before) * (self.cost - cost)
        return max(0.0, left - (time.monotonic() - then))

    def __str__(self) -> str:
        if (seconds := self.seconds) is None:
            return ""
        if seconds < _SOON:
            return f"less than {_AT_MOST:.0f} s left"
        minutes, rest = divmod(round(seconds), 60)
        return f"about {minutes}:{rest:02} left"


class _TimeLeftColumn(ProgressColumn):
    def __init__(self, left: TimeLeft):
        super().__init__()
        self._left = left

    def render(self, task: Task) -> Text:
        return Text(str(self._left), style="progress.remaining")


class Show(Protocol):
    """Function that shows how many parts are done, and their cost if costs differ."""

    def __call__(self, done: int, cost: float | None = None) -> None: ...


@contextmanager
def counting(activity: str, total: int, left: TimeLeft | None = None) -> Iterator[Show]:
    """Show a bar, or occasional lines if stderr is a log; yield a function of the count done.

    left: for work whose parts differ in cost, or that has begun; None if all parts cost the same.

    If stdout and stderr are the same terminal, what is printed on stdout appears above the bar.
    """
    console = Console(stderr=True)
    started = logged = time.monotonic()
    time_left = left or TimeLeft(total)
    columns = (
        TextColumn(activity),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        _TimeLeftColumn(time_left),
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

        def show(done: int, cost: float | None = None) -> None:
            nonlocal logged
            now = time.monotonic()
            time_left.done(done if cost is None else cost)
            progress.update(task, completed=done)
            if in_a_log and now - logged >= A_LINE_EVERY:
                logged = now
                said = f"{activity}: {done} of {total} after {now - started:.0f} s"
                print(", ".join(filter(None, (said, str(time_left)))), file=sys.stderr, flush=True)

        yield show
