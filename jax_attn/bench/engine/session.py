"""A run of the bench: workers start, programs are judged, then timed in interleaved rounds."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from jax_attn.bench import statistics
from jax_attn.bench.arrays import sampled_rows
from jax_attn.bench.engine import memory, roofline
from jax_attn.bench.engine.plan import SessionPlan
from jax_attn.bench.engine.rounds import interleaved
from jax_attn.bench.engine.worker import AbsentError, RefusedError, Worker, WorkerError
from jax_attn.bench.implementations import IMPLEMENTATIONS, REFERENCE
from jax_attn.bench.record import JUDGED_ROWS, MATRIX_PRODUCTS, Measurement, Record, Status
from jax_attn.bench.workload import Workload
from jax_attn.environment import describe, version
from jax_attn.parity.judge.compare import Verdict

PEERS = ("equinox", "keras", "torchax", "psutil", "matplotlib")
_JUDGE = "judge"
_PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}


class Session:
    """One run. Whatever ends it early, `record` gives what was measured until then.

    start: how a worker is made: `Worker`, or what stands in for it.
    """

    def __init__(self, plan: SessionPlan, start: Callable[..., Any] = Worker):
        self.plan, self._start = plan, start
        self._workers: dict[str, Any] = {}
        self._unloaded: dict[str, tuple[Status, str]] = {}
        self._rows: dict[tuple[Workload, str, str], Measurement] = {}
        self._dispatch: dict[tuple[Workload, str, str], list[float]] = {}
        self._rates: dict[str, float] = {}
        self.environment: dict[str, Any] = {}

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_) -> None:
        for worker in self._workers.values():
            worker.hang_up()
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    @property
    def steps(self) -> int:
        """How often `run` yields at least; each round of each mode counts as one."""
        plan = self.plan
        modes = sum(len(plan.modes_of(workload)) for workload in plan.workloads)
        return 1 + len(plan.workloads) * (1 + len(plan.names)) + modes

    def run(self) -> Iterator[str]:
        """Measure all; yields, step by step, what was done."""
        plan = self.plan
        self.environment = _environment()
        self._load(plan.started)
        yield "workers started"
        for workload in plan.workloads:
            if plan.device == "gpu":  # an allocator's peak cannot be set back in JAX
                self.__exit__()
            self._load([n for n in plan.started if n not in self._workers])
            yield from self._yardstick()
            yield from self._workload(workload)

    def _yardstick(self) -> Iterator[str]:
        """Matrix products by one worker of each framework, anew before each workload."""
        workers: dict[str, Any] = {}
        for name in filter(self._workers.get, self.plan.names):
            workers.setdefault(IMPLEMENTATIONS[name].framework, self._workers[name])
        yield from roofline.measure(workers, self.plan.dtype, self._rates, self.plan.seed)

    def _load(self, names: Iterable[str]) -> None:
        """Start workers two at a time, so that one imports while another reads its files."""

        def start(name: str) -> None:
            implementation, plan = IMPLEMENTATIONS[name], self.plan
            if implementation.absent:
                self._unloaded[name] = Status.ABSENT, implementation.absent
            if name in self._unloaded:
                return
            worker = self._start(
                name,
                "jax_attn.bench.engine.runner:Runner",
                name,
                plan.device,
                plan.threads,
                threads=plan.threads,
                environment=environment(implementation.environment, plan.device),
            )
            self._workers[name] = worker
            try:
                worker.ask("load")
            except AbsentError as error:
                said = "; ".join(filter(None, (str(error), implementation.install)))
                self._unloaded[name] = Status.ABSENT, said
                self._workers.pop(name).close()
            except WorkerError as error:
                self._unloaded[name] = Status.FAILED, str(error)
                self._workers.pop(name).close()

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(start, names))

    def _workload(self, workload: Workload) -> Iterator[str]:
        plan, unjudged = self.plan, self._prepared(workload)
        for name in plan.judged:
            if lacks := IMPLEMENTATIONS[name].lacks(workload):
                self._all(workload, name, Status.NOT_RUN, lacks)
            elif unjudged:
                self._all(workload, name, Status.NOT_RUN, unjudged)
            elif name in self._unloaded:
                self._all(workload, name, *self._unloaded[name])
            else:
                self._judged(workload, name)
            yield f"{workload.name}: {name} judged"
        for mode in plan.modes_of(workload):
            yield from self._timed(workload, mode)

    def _prepared(self, workload: Workload) -> str:
        """Why no verdict can be had, and so nothing timed; "" where one can."""
        plan = self.plan
        if _JUDGE not in self._workers:
            self._workers[_JUDGE] = self._start(
                _JUDGE,
                "jax_attn.bench.engine.judge:Judge",
                threads=plan.threads,
                environment={},
            )
        try:
            self._asking(_JUDGE)("prepare", workload, plan.seed, plan.modes_of(workload))
        except WorkerError as error:
            return f"no reference to judge by: {error}"
        return ""

    def _judged(self, workload: Workload, name: str) -> None:
        """Build, compile, compare; what fails says so in its row."""
        ask, judge = self._asking(name), self._asking(_JUDGE)
        self._all(workload, name, Status.NOT_RUN, "not reached")
        try:
            built = ask("build", workload, self.plan.seed)
        except WorkerError as error:
            self._all(workload, name, _fate(error), str(error))
            return
        for mode in self.plan.modes_of(workload):
            try:
                compile_s, compiler_bytes = ask("compile", mode)
                first = ask("first_call", mode)
                tensors = ask("tensors", mode)
                if name == REFERENCE:
                    judge("take_own", mode, tensors)
                agreement = judge("judge", mode, tensors)
                peak = ask("peak", mode)
            except WorkerError as error:
                fate = {"status": _fate(error), "reason": str(error)}
                self._put(workload, mode, name, **built, **fate)
                continue
            wrong = agreement.verdict is Verdict.FAIL
            self._put(
                workload,
                mode,
                name,
                status=Status.EXCLUDED if wrong else Status.NOT_RUN,
                reason="; ".join(agreement.reasons) or "not timed",
                **built,
                verdict=str(agreement.verdict),
                tensor=agreement.tensor,
                error=agreement.error,
                reference_error=agreement.reference_error,
                compile_s=compile_s,
                first_call_s=first,
                peak_bytes=peak,
                compiler_bytes=compiler_bytes,
            )

    def _timed(self, workload: Workload, mode: str) -> Iterator[str]:
        """Rounds of all that agreed, or of which no verdict could be had."""
        plan, turns = self.plan, {}
        for name in plan.judged:
            row = self._rows[workload, mode, name]
            if row.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE):
                turns[name] = self._turn(workload, mode, name)
        found: dict[str, list[float]] = {}
        try:
            for done in interleaved(turns, found, plan.baseline, plan.limits, plan.seed):
                yield f"{workload.name}: {mode}, round {done}"
        finally:
            whole = {
                name: seconds
                for name, seconds in found.items()
                if self._rows[workload, mode, name].status is not Status.FAILED
            }
            for name, seconds in whole.items():
                self._times(workload, mode, name, seconds, whole.get(plan.baseline, []))

    def _turn(self, workload: Workload, mode: str, name: str) -> Callable[[], float | None]:
        """A turn of that worker; None where it fails, which its row then says."""
        ask = self._asking(name)
        dispatched = self._dispatch[workload, mode, name] = []

        def turn() -> float | None:
            try:
                seconds, until_returned = ask("turn", mode)
            except WorkerError as error:
                self._put(workload, mode, name, status=_fate(error), reason=str(error))
                return None
            dispatched.append(until_returned)
            return seconds

        return turn

    def _times(self, workload: Workload, mode: str, name: str, seconds, baseline) -> None:
        row = self._rows[workload, mode, name]
        paired = statistics.shared(baseline, seconds)
        ratio = statistics.ratio(*paired, self.plan.seed) if paired[0] else None
        reason = "" if row.reason == "not timed" else row.reason
        timed = replace(row, status=Status.MEASURED, reason=reason, seconds=tuple(seconds))
        if self.plan.device == "gpu":
            timed = replace(timed, dispatch=tuple(self._dispatch[workload, mode, name]))
        self._rows[workload, mode, name] = replace(timed, ratio=ratio)

    def _asking(self, name: str) -> Callable[..., Any]:
        """The worker's `ask`; one whose process is lost is started anew for the next workload."""

        def ask(method: str, *arguments: Any) -> Any:
            if name not in self._workers:
                raise RefusedError("its process was lost")
            try:
                return self._workers[name].ask(method, *arguments)
            except WorkerError as error:
                if error.gone:
                    self._workers.pop(name).close()
                raise

        return ask

    def _put(self, workload: Workload, mode: str, name: str, **known: Any) -> None:
        key = workload, mode, name
        framework = IMPLEMENTATIONS[name].framework
        row = self._rows.get(key) or Measurement(*key, framework, Status.NOT_RUN)
        self._rows[key] = replace(row, **known)

    def _all(self, workload: Workload, name: str, status: Status, reason: str) -> None:
        for mode in self.plan.modes_of(workload):
            self._put(workload, mode, name, status=status, reason=reason)

    def record(self, interrupted: bool = False) -> Record:
        """What was measured, as plain data."""
        plan = self.plan
        order = {name: i for i, name in enumerate(IMPLEMENTATIONS)}
        keys = sorted(
            self._rows,
            key=lambda k: (plan.workloads.index(k[0]), plan.modes.index(k[1]), order[k[2]]),
        )
        best = max(self._rates.values(), default=None)
        return Record(
            environment=self.environment,
            settings=_settings(plan) | {MATRIX_PRODUCTS: dict(self._rates)},
            roofline={} if best is None else {plan.dtype: best},
            rows=tuple(self._rows[key] for key in keys),
            interrupted=interrupted,
        )


def _fate(error: WorkerError) -> Status:
    """What becomes of a row whose worker said this: to refuse is no failure."""
    return Status.NOT_RUN if isinstance(error, RefusedError) else Status.FAILED


def environment(own: dict[str, str], device: str) -> dict[str, str]:
    """What a worker's frameworks read when they start."""
    return own | {"JAX_PLATFORMS": _PLATFORMS[device], "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def _settings(plan: SessionPlan) -> dict[str, Any]:
    limits = plan.limits
    return {
        "threads": plan.threads,
        "precision": "highest",
        "device": plan.device,
        "baseline": plan.baseline,
        "rounds": {"least": limits.least, "most": limits.most, "seconds": limits.seconds},
        "seed": plan.seed,
        # Of how many queries each workload was judged; gradients are whole.
        JUDGED_ROWS: {w.name: f"{len(sampled_rows(w))} of {w.T}" for w in plan.workloads},
    }


def _environment() -> dict[str, Any]:
    found = describe()
    found["packages"] |= {name: v for name in PEERS if (v := version(name)) is not None}
    found["memory_available_bytes"] = memory.available()
    found["load_average"] = os.getloadavg()[0]
    return found
