"""A run of the bench: workers start, programs are judged, then timed in interleaved rounds."""

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from jax_attn.bench import statistics
from jax_attn.bench.arrays import SEED, sampled_rows
from jax_attn.bench.engine import memory
from jax_attn.bench.engine.rounds import Limits, interleaved, measure_products
from jax_attn.bench.engine.worker import AbsentError, LostError, RefusedError, Worker, WorkerError
from jax_attn.bench.implementations import IMPLEMENTATIONS, REFERENCE
from jax_attn.bench.record import JUDGED_ROWS, MATRIX_PRODUCTS, Measurement, Record, Status
from jax_attn.bench.workload import CACHED, MODES, Workload
from jax_attn.environment import describe, version
from jax_attn.parity.judge.compare import Verdict

PEERS = ("equinox", "keras", "torchax", "psutil", "matplotlib")
_JUDGE = "judge"
_PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}

Key: TypeAlias = tuple[Workload, str, str]
"""Workload, mode and name of the implementation."""


@dataclass(frozen=True)
class SessionPlan:
    """The workloads, implementations and settings of a run."""

    workloads: tuple[Workload, ...]
    implementations: tuple[str, ...]
    threads: int
    modes: tuple[str, ...] = (*MODES, *CACHED)
    baseline: str = REFERENCE
    device: str = "cpu"
    limits: Limits = field(default_factory=Limits)
    seed: int = SEED

    @property
    def dtype(self) -> str:
        """The dtype of all workloads."""
        return self.workloads[0].dtype

    @property
    def names(self) -> tuple[str, ...]:
        """The implementations in the record; the baseline and the reference are always included."""
        wanted = {*self.implementations, self.baseline, REFERENCE}
        return tuple(name for name in IMPLEMENTATIONS if name in wanted)

    @property
    def judged(self) -> tuple[str, ...]:
        """`names`, the reference first, because others' errors are compared with its own."""
        return tuple(sorted(self.names, key=lambda name: name != REFERENCE))

    @property
    def started(self) -> list[str]:
        """Those of `names` that have a program for any of the workloads."""
        rows = [IMPLEMENTATIONS[name] for name in self.names]
        return [row.name for row in rows if not all(map(row.lacks, self.workloads))]

    def modes_of(self, workload: Workload) -> tuple[str, ...]:
        """The modes in which the workload is measured."""
        return tuple(mode for mode in workload.modes if mode in self.modes)


class Session:
    """One run. Whatever ends it early, `record` returns what was measured until then."""

    def __init__(self, plan: SessionPlan, start: Callable[..., Any] = Worker) -> None:
        self.plan, self._start = plan, start
        self._workers: dict[str, Any] = {}
        self._unloaded: dict[str, tuple[Status, str]] = {}
        self._rows: dict[Key, Measurement] = {}
        self._dispatch: dict[Key, list[float]] = {}
        self._rates: dict[str, float] = {}
        self.environment: dict[str, Any] = {}

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.hang_up()
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    @property
    def steps(self) -> int:
        """The least number of times that `run` yields, with one round in each mode."""
        plan = self.plan
        modes = sum(len(plan.modes_of(workload)) for workload in plan.workloads)
        return 1 + len(plan.workloads) * (1 + len(plan.names)) + modes

    def run(self) -> Generator[str, None, None]:
        """Measure everything; yields after each step what was done."""
        plan = self.plan
        self.environment = session_environment()
        self._start_workers(plan.started)
        yield "workers started"
        for workload in plan.workloads:
            if plan.device == "gpu":  # in JAX an allocator's peak cannot be reset
                self.__exit__()
            self._start_workers([n for n in plan.started if n not in self._workers])
            one_a_framework: dict[str, Any] = {}
            for name in filter(self._workers.get, plan.names):
                one_a_framework.setdefault(IMPLEMENTATIONS[name].framework, self._workers[name])
            yield from measure_products(one_a_framework, plan.dtype, self._rates, plan.seed)
            yield from self._measure(workload)

    def _start_workers(self, names: Iterable[str]) -> None:
        """Start workers two at a time, so that one imports while another reads its files."""

        def start(name: str) -> None:
            implementation, plan = IMPLEMENTATIONS[name], self.plan
            if implementation.absent:
                self._unloaded[name] = Status.ABSENT, implementation.absent
            if name in self._unloaded:
                return
            runner = "jax_attn.bench.engine.runner:Runner", name, plan.device, plan.threads
            variables = environment(implementation.environment, plan.device)
            worker = self._start(name, *runner, threads=plan.threads, environment=variables)
            self._workers[name] = worker
            try:
                worker.ask("load")
            except WorkerError as error:
                absent = isinstance(error, AbsentError)
                reasons = str(error), implementation.install if absent else ""
                status = Status.ABSENT if absent else Status.FAILED
                self._unloaded[name] = status, "; ".join(filter(None, reasons))
                self._workers.pop(name).close()

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(start, names))

    def _measure(self, workload: Workload) -> Iterator[str]:
        plan, no_reference = self.plan, self._prepare_judge(workload)
        for name in plan.judged:
            if lacks := IMPLEMENTATIONS[name].lacks(workload):
                self._note_all(workload, name, Status.NOT_RUN, lacks)
            elif no_reference:
                self._note_all(workload, name, Status.NOT_RUN, no_reference)
            elif name in self._unloaded:
                self._note_all(workload, name, *self._unloaded[name])
            else:
                self._judge(workload, name)
            yield f"{workload.name}: {name} judged"
        for mode in plan.modes_of(workload):
            yield from self._time(workload, mode)

    def _prepare_judge(self, workload: Workload) -> str:
        """Why there is no reference to judge by, and so nothing to time; "" if there is one."""
        plan = self.plan
        if _JUDGE not in self._workers:
            self._workers[_JUDGE] = self._start(
                _JUDGE, "jax_attn.bench.engine.judge:Judge", threads=plan.threads, environment={}
            )
        try:
            self._asker(_JUDGE)("prepare", workload, plan.seed, plan.modes_of(workload))
        except WorkerError as error:
            return f"no reference to judge by: {error}"
        return ""

    def _judge(self, workload: Workload, name: str) -> None:
        """Build, compile, compare; a failure is noted in the measurement."""
        ask, judge = self._asker(name), self._asker(_JUDGE)
        self._note_all(workload, name, Status.NOT_RUN, "not reached")
        try:
            built = ask("build", workload, self.plan.seed)
        except WorkerError as error:
            self._note_all(workload, name, _fate(error), str(error))
            return
        for mode in self.plan.modes_of(workload):
            try:
                compile_s, compiler_bytes = ask("compile", mode)
                first = ask("first_call", mode)
                tensors = ask("tensors", mode)
                if name == REFERENCE:
                    judge("take_own", mode, tensors)
                judged = judge("judge", mode, tensors)
                peak = ask("peak", mode)
            except WorkerError as error:
                self._note(workload, mode, name, **built, status=_fate(error), reason=str(error))
                continue
            wrong = judged["verdict"] == Verdict.FAIL
            fields = built | judged | {"reason": judged["reason"] or "not timed"}
            fields |= {"compile_s": compile_s, "compiler_bytes": compiler_bytes}
            fields |= {"first_call_s": first, "peak_bytes": peak}
            status = Status.EXCLUDED if wrong else Status.NOT_RUN
            self._note(workload, mode, name, status=status, **fields)

    def _time(self, workload: Workload, mode: str) -> Iterator[str]:
        """Run rounds of all whose verdict is PASS or INCONCLUSIVE."""
        plan = self.plan
        turns = {
            name: self._turn(workload, mode, name)
            for name in plan.judged
            if self._rows[workload, mode, name].verdict in (Verdict.PASS, Verdict.INCONCLUSIVE)
        }
        times: dict[str, list[float]] = {}
        try:
            for done in interleaved(turns, times, plan.baseline, plan.limits, plan.seed):
                yield f"{workload.name}: {mode}, round {done}"
        finally:
            failed = {n for n in times if self._rows[workload, mode, n].status is Status.FAILED}
            whole = {name: seconds for name, seconds in times.items() if name not in failed}
            for name, seconds in whole.items():
                self._keep_times((workload, mode, name), seconds, whole.get(plan.baseline, []))

    def _turn(self, workload: Workload, mode: str, name: str) -> Callable[[], float | None]:
        """A function that has the worker time a call; it notes a failure and returns None."""
        ask = self._asker(name)
        dispatched = self._dispatch[workload, mode, name] = []

        def turn() -> float | None:
            try:
                seconds, until_returned = ask("turn", mode)
            except WorkerError as error:
                self._note(workload, mode, name, status=_fate(error), reason=str(error))
                return None
            dispatched.append(until_returned)
            return seconds

        return turn

    def _keep_times(self, key: Key, seconds: list[float], baseline: list[float]) -> None:
        row = self._rows[key]
        paired = statistics.shared(baseline, seconds)
        ratio = statistics.paired_ratio(*paired, self.plan.seed) if paired[0] else None
        reason = "" if row.reason == "not timed" else row.reason
        times: dict[str, Any] = {"seconds": tuple(seconds), "ratio": ratio}
        if self.plan.device == "gpu":
            times["dispatch"] = tuple(self._dispatch[key])
        self._note(*key, status=Status.MEASURED, reason=reason, **times)

    def _asker(self, name: str) -> Callable[..., Any]:
        """The worker's `ask`; a worker whose process is lost restarts for the next workload."""

        def ask(method: str, *arguments: Any) -> Any:
            if name not in self._workers:
                raise RefusedError("its process was lost")
            try:
                return self._workers[name].ask(method, *arguments)
            except LostError:
                self._workers.pop(name).close()
                raise

        return ask

    def _note(self, workload: Workload, mode: str, name: str, **fields: Any) -> None:
        key = workload, mode, name
        framework = IMPLEMENTATIONS[name].framework
        row = self._rows.get(key) or Measurement(*key, framework, Status.NOT_RUN)
        self._rows[key] = replace(row, **fields)

    def _note_all(self, workload: Workload, name: str, status: Status, reason: str) -> None:
        for mode in self.plan.modes_of(workload):
            self._note(workload, mode, name, status=status, reason=reason)

    def record(self, interrupted: bool = False) -> Record:
        """What was measured, as plain data."""
        plan = self.plan
        order = {name: i for i, name in enumerate(IMPLEMENTATIONS)}
        keys = sorted(
            self._rows,
            key=lambda k: (plan.workloads.index(k[0]), plan.modes.index(k[1]), order[k[2]]),
        )
        best = max(self._rates.values(), default=None)
        settings = {
            "threads": plan.threads,
            "precision": "highest",
            "device": plan.device,
            "baseline": plan.baseline,
            "rounds": asdict(plan.limits),
            "seed": plan.seed,
            # The queries on which each workload is judged; gradients are whole.
            JUDGED_ROWS: {w.name: f"{len(sampled_rows(w))} of {w.T}" for w in plan.workloads},
            MATRIX_PRODUCTS: dict(self._rates),
        }
        return Record(
            environment=self.environment,
            settings=settings,
            roofline={} if best is None else {plan.dtype: best},
            rows=tuple(self._rows[key] for key in keys),
            interrupted=interrupted,
        )


def _fate(error: WorkerError) -> Status:
    """The status that a worker's error leaves: a refusal is no failure."""
    return Status.NOT_RUN if isinstance(error, RefusedError) else Status.FAILED


def environment(own: dict[str, str], device: str) -> dict[str, str]:
    """The variables that a worker's frameworks read when they start."""
    return own | {"JAX_PLATFORMS": _PLATFORMS[device], "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def session_environment() -> dict[str, Any]:
    """Machine, versions, free memory and load."""
    here = describe()
    here["packages"] |= {name: v for name in PEERS if (v := version(name)) is not None}
    here["memory_available_bytes"] = memory.available()
    here["load_average"] = os.getloadavg()[0]
    return here
