"""Progress bars on stderr, so that stdout holds only data."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

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

from jax_attn.progress import TimeLeft, counting

if TYPE_CHECKING:
    from jax_attn.selfcheck.process_pool import Piece

T = TypeVar("T")


def tracked(batches: Iterable[Sequence[T]], total: int) -> Generator[T]:
    """Yield all items; show progress as a bar, or as a line now and then if stderr is a log."""
    done = 0
    with counting("verifying", total) as show:
        for batch in batches:
            yield from batch
            done += len(batch)
            show(min(done, total))


def worked_off(work: "Sequence[Piece]", processes: int | None = None) -> Generator[Any]:
    """Run the pieces of work and yield their items; show progress, with time left by their cost."""
    from jax_attn.selfcheck import process_pool

    rows, cost = 0, 0.0
    left = TimeLeft(sum(piece.cost for piece in work))
    with counting("verifying", sum(piece.rows for piece in work), left) as show:
        for piece, items in process_pool.run(work, processes):
            yield from items
            rows, cost = rows + piece.rows, cost + piece.cost
            show(rows, cost)


def counted(steps: Iterable[str], total: int) -> Iterator[str]:
    """Yield each step when it is done, named next to the bar; `total` grows if it was too low."""
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
    """Show a progress bar of bytes; call the yielded function with the number of further bytes."""
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
