"""Interleaved rounds: each runs every implementation once, one at a time, in a fresh order.

Matrix products and memory reads are timed in the same way; their best rates are the rooflines of a
run.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from jax_attn.bench.engine.worker import Worker, WorkerError
from jax_attn.bench.workload import FORWARD

SIZES = {"cpu": 2048, "gpu": 8192}
"""Device -> rows and columns of the square matrices whose product is timed. A GPU multiplies the
smaller ones faster than a call begins."""
READ = 2**28
"""Bytes of the array that is read to time the memory; larger than the caches."""


@dataclass(frozen=True)
class Limits:
    """The number of rounds: at most `most`.

    An implementation leaves earlier if it has run `least` rounds and spent `seconds`: by default a
    call of 0.1 s is timed 21 times, and one of a second seven times.
    """

    least: int = 7
    most: int = 21
    seconds: float = 2.5

    @classmethod
    def of(cls, rounds: int | None) -> "Limits":
        """Return limits of exactly `rounds` rounds, or the default limits for None."""
        return cls() if rounds is None else cls(rounds, rounds)


def interleaved(
    turns: Mapping[str, Callable[[], float | None]],
    times: dict[str, list[float]],
    anchor: str,
    limits: Limits,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[int]:
    """Fill `times` with one number per round for each name; yield the number of rounds done.

    A name leaves when its turn returns None, which means that it failed. The i-th number of a name
    belongs to the i-th round. The anchor, with whose times the others are compared, stays as long
    as any other, so it has a number for every round. `times` stays valid if the caller stops early.
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
    workers: Mapping[str, Worker], dtype: str, rates: dict[str, float], seed: int, device: str
) -> Iterator[str]:
    """Raise `rates` (framework → FLOP/s of a matrix product) to the measured rates; yield once.

    Called throughout a run, because a ceiling measured while the machine is slow is too low.
    workers: one loaded worker per framework, with the same threads as all measurements.
    """
    size = SIZES[device]
    _measure(workers, ("build_product", size, dtype), 2 * size**3, rates, seed)
    yield "matrix products"


def measure_reads(workers: Mapping[str, Worker], rates: dict[str, float], seed: int) -> None:
    """Raise `rates` (framework → bytes/s of a sum over an array) to the measured rates."""
    _measure(workers, ("build_sum", READ), READ, rates, seed)


def _measure(
    workers: Mapping[str, Worker],
    request: tuple[Any, ...],
    amount: int,
    rates: dict[str, float],
    seed: int,
) -> None:
    """Raise `rates` to those of the requested program. amount: operations or bytes of a call."""
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
    for framework in turns:
        with contextlib.suppress(WorkerError):
            workers[framework].ask("drop")  # a process that waits must not hold the arrays
    for name, seconds in times.items():
        rates[name] = max(rates.get(name, 0.0), amount / statistics.median(seconds))


def _turn(worker: Worker) -> float | None:
    try:
        return worker.ask("turn", FORWARD)[0]
    except WorkerError:
        return None
