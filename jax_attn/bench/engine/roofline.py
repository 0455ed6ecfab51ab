"""The yardstick of a run: the best rate of a square matrix product, by either framework."""

import statistics
from collections.abc import Iterator, Mapping
from functools import partial

from jax_attn.bench.engine.rounds import Limits, interleaved
from jax_attn.bench.engine.worker import Worker, WorkerError
from jax_attn.bench.workload import FORWARD

SIZE = 2048
_LIMITS = Limits(least=5, most=5)


def measure(
    workers: Mapping[str, Worker], dtype: str, rates: dict[str, float], seed: int
) -> Iterator[str]:
    """Raise `rates`, framework -> FLOP/s of its median call, to what is found; yields once.

    Called throughout a run: a ceiling found while the machine was slow would be none.
    workers: one a framework, loaded; they have the threads that everything is measured with.
    """
    turns, found = {}, {}
    for framework, worker in workers.items():
        try:
            worker.ask("build_product", SIZE, dtype)
            worker.ask("compile", FORWARD)
        except WorkerError:
            continue  # the other framework's rate remains
        turns[framework] = partial(_turn, worker)
    for _ in interleaved(turns, found, "", _LIMITS, seed):
        pass
    for name, seconds in found.items():
        rates[name] = max(rates.get(name, 0.0), 2 * SIZE**3 / statistics.median(seconds))
    yield "matrix products"


def _turn(worker: Worker) -> float | None:
    try:
        return worker.ask("turn", FORWARD)[0]
    except WorkerError:
        return None
