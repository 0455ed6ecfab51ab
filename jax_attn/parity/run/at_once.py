"""Concurrent calls in a few threads, with results in the order of the calls."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    call: Callable[[Item], Result], items: Iterable[Item], threads: int
) -> Iterator[Result]:
    """Yield call(item) for each item, in order; at most `threads` calls are running or unread.

    An error of a call is raised in place of its result, after the running calls have ended.
    """
    left = iter(items)
    with ThreadPoolExecutor(threads) as pool:
        pending = deque(pool.submit(call, item) for item in islice(left, threads))
        while pending:
            yield pending.popleft().result()
            pending.extend(pool.submit(call, item) for item in islice(left, 1))


def together(calls: Sequence[Callable[[], Result]], threads: int) -> list[Result]:
    """Return the results of the calls, in order; each call starts as soon as a thread is free."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda call: call(), calls))
