"""The roofline of a run: the best rate of a square matrix product in either framework."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from jax_attn.bench.engine.rounds import Limits, interleaved
from jax_attn.bench.engine.worker import Worker, WorkerError
from jax_attn.bench.workload import FORWARD

SIZE = 2048
_LIMITS = Limits(least=5, most=5)


def measure(
    workers: Mapping[str, Worker], dtype: str, rates: dict[str, float], seed: int
) -> Iterator[str]:
    """Raise `rates`, framework → FLOP/s of its median call, to what is measured; yields once.

    Called throughout a run, because a ceiling measured while the machine is slow is too low.
    workers: one a framework, loaded, with the threads that everything is measured with.
    """
    turns: dict[str, Callable[[], float | None]] = {}
    times: dict[str, list[float]] = {}
    for framework, worker in workers.items():
        try:
            worker.ask("build_product", SIZE, dtype)
            worker.ask("compile", FORWARD)
        except WorkerError:
            continue  # the other framework's rate remains
        turns[framework] = partial(_turn, worker)
    for _ in interleaved(turns, times, "", _LIMITS, seed):
        pass
    for name, seconds in times.items():
        rates[name] = max(rates.get(name, 0.0), 2 * SIZE**3 / statistics.median(seconds))
    yield "matrix products"


def _turn(worker: Worker) -> float | None:
    try:
        return worker.ask("turn", FORWARD)[0]
    except WorkerError:
        return None
