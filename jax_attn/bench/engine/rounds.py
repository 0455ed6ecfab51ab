"""Interleaved rounds: each runs every implementation once, one at a time, in a fresh order.

So are the matrix products, and the reads of memory, whose best rates are the rooflines of a run.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from jax_attn.bench.engine.worker import Worker, WorkerError
from jax_attn.bench.workload import FORWARD

SIZE = 2048
"""Of the square matrices whose product is timed."""
READ = 2**28
"""Bytes of the array that is read to time the memory: more than caches hold."""


@dataclass(frozen=True)
class Limits:
    """How many rounds: `most`; a slow implementation leaves after `least` and `seconds` spent.

    A call of 0.1 s is timed 21 times, one of a second seven times.
    """

    least: int = 7
    most: int = 21
    seconds: float = 2.5

    @classmethod
    def of(cls, rounds: int | None) -> "Limits":
        """Exactly so many rounds, or the default."""
        return cls() if rounds is None else cls(rounds, rounds)


def interleaved(
    turns: Mapping[str, Callable[[], float | None]],
    times: dict[str, list[float]],
    anchor: str,
    limits: Limits,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[int]:
    """Fill `times` with one number a round for each name; yields the number of rounds done.

    A turn that returns None has failed, and its name leaves. The anchor, with whose times the
    others are compared, stays as long as any other: the i-th number of each name belongs to the
    i-th round, and the anchor has one too. `times` stays valid if the caller stops early.
    """
    rng = np.random.default_rng(seed)
    spent = dict.fromkeys(turns, 0.0)
    going = list(turns)
    for done in range(1, limits.most + 1):
        for i in rng.permutation(len(going)):
            name = going[i]
            started = clock()
            seconds = turns[name]()
            spent[name] += clock() - started
            if seconds is None:
                spent[name] = np.inf
            else:
                times.setdefault(name, []).append(seconds)
        yield done
        allowed = limits.seconds if done >= limits.least else np.inf
        going = [name for name in going if spent[name] < allowed]
        if not going:
            return
        if anchor in turns and anchor not in going and np.isfinite(spent[anchor]):
            going.append(anchor)


def measure_products(
    workers: Mapping[str, Worker], dtype: str, rates: dict[str, float], seed: int
) -> Iterator[str]:
    """Raise `rates`, framework → FLOP/s of a matrix product, to what is measured; yields once.

    Called throughout a run, because a ceiling measured while the machine is slow is too low.
    workers: one a framework, loaded, with the threads that everything is measured with.
    """
    _measure(workers, ("build_product", SIZE, dtype), 2 * SIZE**3, rates, seed)
    yield "matrix products"


def measure_reads(workers: Mapping[str, Worker], rates: dict[str, float], seed: int) -> None:
    """Raise `rates`, framework → bytes/s of a sum over an array, to what is measured."""
    _measure(workers, ("build_sum", READ), READ, rates, seed)


def _measure(
    workers: Mapping[str, Worker],
    request: tuple[Any, ...],
    amount: int,
    rates: dict[str, float],
    seed: int,
) -> None:
    """amount: of what a call of the requested program does."""
    turns: dict[str, Callable[[], float | None]] = {}
    times: dict[str, list[float]] = {}
    for framework, worker in workers.items():
        try:
            worker.ask(*request)
            worker.ask("compile", FORWARD)
        except WorkerError:
            continue  # the other framework's rate remains
        turns[framework] = partial(_turn, worker)
    for _ in interleaved(turns, times, "", Limits(least=5, most=5), seed):
        pass
    for name, seconds in times.items():
        rates[name] = max(rates.get(name, 0.0), amount / statistics.median(seconds))


def _turn(worker: Worker) -> float | None:
    try:
        return worker.ask("turn", FORWARD)[0]
    except WorkerError:
        return None
