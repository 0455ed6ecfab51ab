"""The processes of a run: one for each implementation, and those of judge and rooflines."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax_attn.bench.engine.plan import BenchPlan
from jax_attn.bench.engine.worker import (
    PATIENCE_SECONDS,
    AbsentError,
    LostError,
    RefusedError,
    Worker,
    WorkerError,
)
from jax_attn.bench.implementations import EAGER, IMPLEMENTATIONS, JAX, OURS, TORCH
from jax_attn.bench.record import Status

_PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}
# framework -> the implementation whose process times its matrix products
_PRODUCTS = {TORCH: EAGER, JAX: OURS}


class Processes:
    """The workers by name, and why implementations have none.

    unloaded: name -> its status and the reason. digests: those of the pair that was judged, which
    every process must make again; empty without a pair.
    """

    def __init__(self, plan: BenchPlan, start: Callable[..., Any] = Worker) -> None:
        self.plan, self._start = plan, start
        self.workers: dict[str, Any] = {}
        self.unloaded: dict[str, tuple[Status, str]] = {}
        self.digests: dict[str, str] = {}

    def start(
        self,
        name: str,
        make: str,
        *arguments: Any,
        variables: Mapping[str, str] = {},
        patience: float | None = PATIENCE_SECONDS,
    ) -> Any:
        """Start a worker with the environment variables that its frameworks read."""
        device = {"JAX_PLATFORMS": _PLATFORMS[self.plan.device]}
        self.workers[name] = worker = self._start(
            name,
            f"jax_attn.bench.engine.{make}",
            *arguments,
            threads=self.plan.threads,
            environment={**variables, **device, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            patience=patience,
        )
        return worker

    def asker(self, name: str) -> Callable[..., Any]:
        """Return the worker's `ask`, which drops the worker if its process is lost."""

        def ask(method: str, *arguments: Any) -> Any:
            if name not in self.workers:
                raise RefusedError("its process was lost")
            try:
                return self.workers[name].ask(method, *arguments)
            except LostError:
                self.close(name)
                raise

        return ask

    def close(self, *names: str) -> None:
        """End these processes, as far as they run."""
        workers = [self.workers.pop(name) for name in names if name in self.workers]
        for worker in workers:
            worker.hang_up()
        for worker in workers:
            worker.close()

    def load(self, names: Iterable[str]) -> None:
        """Start the workers of these implementations, unless they run.

        Two start at a time, one imports while the other reads its files, or one for two threads. In
        one process only one does, because they would share random state.
        """
        with ThreadPoolExecutor(max(2, self.plan.threads // 2) if self.plan.alone else 1) as pool:
            list(pool.map(self._load, [name for name in names if name not in self.workers]))

    def _load(self, name: str) -> None:
        """Start a worker, or keep why there is none."""
        implementation, plan = IMPLEMENTATIONS[name], self.plan
        if implementation.absent:
            self.unloaded[name] = Status.ABSENT, implementation.absent
        if name in self.unloaded:
            return
        pair = None if plan.pair is None else (plan.pair, plan.lengths)
        arguments = "runner:Runner", name, plan.device, plan.threads, pair
        worker = self.start(name, *arguments, variables=implementation.environment)
        try:
            digests = worker.ask("load") or {}
        except WorkerError as error:
            absent = isinstance(error, AbsentError)
            reasons = str(error), implementation.install if absent else ""
            status = Status.ABSENT if absent else Status.FAILED
            self.unloaded[name] = status, "; ".join(filter(None, reasons))
        else:
            either = self.digests.keys() | digests.keys()
            other = sorted(k for k in either if self.digests.get(k) != digests.get(k))
            if not other:
                return
            self.unloaded[name] = (
                Status.FAILED,
                f"{plan.name}: expected the same arrays from every call, got different ones for "
                f"{', '.join(other[:5])}; seed the random numbers that it draws",
            )
        self.close(name)

    def for_rooflines(self, dtype: str) -> dict[str, Any]:
        """Return a worker for each framework that loads, to measure products in this dtype."""
        plan = self.plan
        variables = {"JAX_ENABLE_X64": "1"} if dtype == "float64" else {}
        names = {framework: f"products by {framework}" for framework in _PRODUCTS}

        def start(framework: str) -> None:
            name, implementation = names[framework], _PRODUCTS[framework]
            arguments = "runner:Runner", implementation, plan.device, plan.threads
            try:
                if name not in self.workers:
                    self.start(name, *arguments, variables=variables).ask("load")
            except WorkerError:
                self.close(name)  # the other framework's rate remains

        with ThreadPoolExecutor(2 if plan.alone else 1) as pool:
            list(pool.map(start, _PRODUCTS))
        return {each: self.workers[name] for each, name in names.items() if name in self.workers}
