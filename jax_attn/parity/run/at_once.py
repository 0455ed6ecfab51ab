"""Calls in a few threads at once, whose results are taken in order."""

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
    """call(item) for each item, in order; at most `threads` are under way or not yet taken.

    What a call raises is raised where its result would be; the calls under way are waited for.
    """
    left = iter(items)
    with ThreadPoolExecutor(threads) as pool:
        pending = deque(pool.submit(call, item) for item in islice(left, threads))
        while pending:
            yield pending.popleft().result()
            pending.extend(pool.submit(call, item) for item in islice(left, 1))


def together(calls: Sequence[Callable[[], Result]], threads: int) -> list[Result]:
    """The results of the calls, each begun as soon as a thread is free."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda call: call(), calls))
