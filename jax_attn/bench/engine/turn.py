"""One turn of a round: a call repeated for a while, and timed, alike in both frameworks."""

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def timed_turn(
    start: Callable[[], T], finish: Callable[[T], object], seconds: float
) -> tuple[float, float]:
    """Median seconds of a call, and until it returns while its result is still under way.

    The medians are over as many calls as begin within `seconds`, and over at least one.

    start: makes the call. finish: waits for what it returned.
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
