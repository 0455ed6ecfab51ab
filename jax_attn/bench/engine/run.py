"""The base of every run of the bench: its processes, its rows, timed rounds, and a record."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol, Self, TypeAlias

from jax_attn.bench import statistics
from jax_attn.bench.engine import memory
from jax_attn.bench.engine.rounds import Limits, interleaved
from jax_attn.bench.engine.worker import LostError, RefusedError, Worker, WorkerError
from jax_attn.bench.record import MATRIX_PRODUCTS, Measurement, Record, Status
from jax_attn.bench.workload import PairWorkload, Workload
from jax_attn.environment import describe, version

PEERS = ("equinox", "keras", "torchax", "psutil", "matplotlib")
NOT_TIMED = "not timed"
_PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}

Key: TypeAlias = tuple[Workload | PairWorkload, str, str]
"""The key of a row: workload, mode, and name of the implementation or way."""


class Plan(Protocol):
    """The settings of every run. baseline: the name with whose times the others are compared."""

    threads: int
    baseline: str
    device: str
    limits: Limits
    seed: int


class Run(ABC):
    """One run. Whatever ends it early, `record` returns what was measured so far."""

    def __init__(self, plan: Any, start: Callable[..., Any] = Worker) -> None:
        self.plan, self._start = plan, start
        self._workers: dict[str, Any] = {}
        self._rows: dict[Key, Measurement] = {}
        self._dispatch: dict[Key, list[float]] = {}
        self._rates: dict[str, float] = {}
        self.environment: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.hang_up()
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def _asker(self, name: str) -> Callable[..., Any]:
        """Return the worker's `ask`, which drops the worker if its process is lost."""

        def ask(method: str, *arguments: Any) -> Any:
            if name not in self._workers:
                raise RefusedError("its process was lost")
            try:
                return self._workers[name].ask(method, *arguments)
            except LostError:
                self._workers.pop(name).close()
                raise

        return ask

    def _note(self, key: Key, **fields: Any) -> None:
        self._rows[key] = replace(self._rows[key], **fields)

    def _time(self, workload: Workload | PairWorkload, mode: str, names: Iterable[str]) -> Iterator:
        """Time these names in rounds, and keep the times of those that did not fail."""
        plan, times = self.plan, dict[str, list[float]]()
        turns = {name: self._turn((workload, mode, name)) for name in names}
        try:
            for done in interleaved(turns, times, plan.baseline, plan.limits, plan.seed):
                yield f"{workload.name}: {mode}, round {done}"
        finally:
            rows = {name: self._rows[workload, mode, name] for name in times}
            whole = {n: times[n] for n, row in rows.items() if row.status is not Status.FAILED}
            for name, seconds in whole.items():
                paired = statistics.shared(whole.get(plan.baseline, []), seconds)
                ratio = statistics.paired_ratio(*paired, plan.seed) if paired[0] else None
                reason = "" if rows[name].reason == NOT_TIMED else rows[name].reason
                fields = {"seconds": tuple(seconds), "ratio": ratio, "reason": reason}
                key = workload, mode, name
                if plan.device == "gpu":
                    fields["dispatch"] = tuple(self._dispatch[key])
                self._note(key, status=Status.MEASURED, **fields)

    def _turn(self, key: Key) -> Callable[[], float | None]:
        """Return a function that has the worker time a call; if it fails, it returns None."""
        _, mode, name = key
        ask, dispatched = self._asker(name), self._dispatch.setdefault(key, [])

        def turn() -> float | None:
            try:
                seconds, until_returned = ask("turn", mode)
            except WorkerError as error:
                self._note(key, status=fate(error), reason=str(error))
                return None
            dispatched.append(until_returned)
            return seconds

        return turn

    @abstractmethod
    def _order(self, key: Key) -> tuple[int, ...]:
        """Return the sort key of a row in the record."""

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Return the settings in the record that are specific to this kind of run."""

    def record(self, interrupted: bool = False) -> Record:
        """Return what was measured, as plain data."""
        plan: Plan = self.plan
        best = max(self._rates.values(), default=None)
        settings = {
            "threads": plan.threads,
            "precision": "highest",
            "device": plan.device,
            "baseline": plan.baseline,
            "rounds": asdict(plan.limits),
            "seed": plan.seed,
            MATRIX_PRODUCTS: dict(self._rates),
        }
        dtypes = {workload.dtype for workload, _, _ in self._rows}
        return Record(
            environment=self.environment,
            settings=settings | self._settings(),
            roofline={} if best is None else dict.fromkeys(dtypes, best),
            rows=tuple(self._rows[key] for key in sorted(self._rows, key=self._order)),
            interrupted=interrupted,
        )


def fate(error: WorkerError) -> Status:
    """Return the status for a worker's error; a refusal is not a failure."""
    return Status.NOT_RUN if isinstance(error, RefusedError) else Status.FAILED


def environment(own: Mapping[str, str], device: str) -> dict[str, str]:
    """Return the environment variables that a worker's frameworks read when they start."""
    return {**own, "JAX_PLATFORMS": _PLATFORMS[device], "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def session_environment() -> dict[str, Any]:
    """Return the machine, versions, free memory and load."""
    here = describe()
    here["packages"] |= {name: v for name in PEERS if (v := version(name)) is not None}
    here["memory_available_bytes"] = memory.available()
    here["load_average"] = os.getloadavg()[0]
    return here
