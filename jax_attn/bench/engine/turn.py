"""One turn of a round: repeat and time a call, in the same way for both frameworks."""

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def timed_turn(
    start: Callable[[], T], finish: Callable[[T], object], seconds: float
) -> tuple[float, float]:
    """Return the median seconds of a call, and the median seconds until the call returns.

    A call may return before its result is ready. The medians are over as many calls as begin within
    `seconds`, and over at least one.

    start: makes the call. finish: waits for its result.
    """
    taken: list[float] = []
    dispatched: list[float] = []
    end = time.perf_counter() + seconds
    while not taken or time.perf_counter() < end:
        started = time.perf_counter()
        result = start()
        returned = time.perf_counter()
        finish(result)
        taken.append(time.perf_counter() - started)
        dispatched.append(returned - started)
    return statistics.median(taken), statistics.median(dispatched)
