"""A run of the bench: start workers, judge programs, then time them in interleaved rounds."""

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from jax_attn.bench.arrays import SEED, sampled_rows
from jax_attn.bench.engine.rounds import Limits, measure_products
from jax_attn.bench.engine.run import NOT_TIMED, Key, Run, environment, fate, session_environment
from jax_attn.bench.engine.worker import AbsentError, Worker, WorkerError
from jax_attn.bench.implementations import IMPLEMENTATIONS, REFERENCE
from jax_attn.bench.record import JUDGED_ROWS, Measurement, Status
from jax_attn.bench.workload import CACHED, MODES, Workload
from jax_attn.parity.judge.compare import Verdict

_JUDGE = "judge"


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
        """The implementations in the record; always with the baseline and the reference."""
        wanted = {*self.implementations, self.baseline, REFERENCE}
        return tuple(name for name in IMPLEMENTATIONS if name in wanted)

    @property
    def judged(self) -> tuple[str, ...]:
        """`names`, the reference first, because the errors of the others are compared with its."""
        return tuple(sorted(self.names, key=lambda name: name != REFERENCE))

    @property
    def started(self) -> list[str]:
        """The members of `names` that have a program for any of the workloads."""
        rows = [IMPLEMENTATIONS[name] for name in self.names]
        return [row.name for row in rows if not all(map(row.lacks, self.workloads))]

    def modes_of(self, workload: Workload) -> tuple[str, ...]:
        """Return the modes in which the workload is measured."""
        return tuple(mode for mode in workload.modes if mode in self.modes)


class Session(Run):
    """A run of `SessionPlan`."""

    plan: SessionPlan

    def __init__(self, plan: SessionPlan, start: Callable[..., Any] = Worker) -> None:
        super().__init__(plan, start)
        self._unloaded: dict[str, tuple[Status, str]] = {}

    @property
    def steps(self) -> int:
        """The least number of steps that `run` yields, with one round in each mode."""
        plan = self.plan
        modes = sum(len(plan.modes_of(workload)) for workload in plan.workloads)
        return len(plan.workloads) * (2 + len(plan.names)) + modes

    def run(self) -> Generator[str, None, None]:
        """Measure everything; yield a description of each step after it."""
        plan = self.plan
        self.environment = session_environment()
        for workload in plan.workloads:
            if plan.device == "gpu":  # JAX cannot reset an allocator's peak, so start new processes
                self.__exit__()
            self._start_workers([n for n in plan.started if n not in self._workers])
            yield f"{workload.name}: workers started"
            one_a_framework: dict[str, Any] = {}
            for name in filter(self._workers.get, plan.names):
                one_a_framework.setdefault(IMPLEMENTATIONS[name].framework, self._workers[name])
            yield from measure_products(one_a_framework, plan.dtype, self._rates, plan.seed)
            yield from self._measure(workload)

    def _start_workers(self, names: Iterable[str]) -> None:
        """Start workers, two at a time, so that one imports while the other reads its files."""

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
            rows = {name: self._rows[workload, mode, name] for name in plan.judged}
            to_time = (Verdict.PASS, Verdict.INCONCLUSIVE)
            yield from self._time(workload, mode, [n for n in rows if rows[n].verdict in to_time])

    def _prepare_judge(self, workload: Workload) -> str:
        """Run the reference; return "", or why there is none, so that nothing can be timed."""
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
        """Build, compile and judge an implementation; note a failure in its measurement."""
        ask, judge = self._asker(name), self._asker(_JUDGE)
        self._note_all(workload, name, Status.NOT_RUN, "not reached")
        try:
            built = ask("build", workload, self.plan.seed)
        except WorkerError as error:
            self._note_all(workload, name, fate(error), str(error))
            return
        for mode in self.plan.modes_of(workload):
            key = workload, mode, name
            try:
                compile_s, compiler_bytes = ask("compile", mode)
                first = ask("first_call", mode)
                tensors = ask("tensors", mode)
                if name == REFERENCE:
                    judge("take_own", mode, tensors)
                judged = judge("judge", mode, tensors)
                peak = ask("peak", mode)
            except WorkerError as error:
                self._note(key, **built, status=fate(error), reason=str(error))
                continue
            wrong = judged["verdict"] == Verdict.FAIL
            fields = built | judged | {"reason": judged["reason"] or NOT_TIMED}
            fields |= {"compile_s": compile_s, "compiler_bytes": compiler_bytes}
            fields |= {"first_call_s": first, "peak_bytes": peak}
            status = Status.EXCLUDED if wrong else Status.NOT_RUN
            self._note(key, status=status, **fields)

    def _note(self, key: Key, **fields: Any) -> None:
        framework = IMPLEMENTATIONS[key[2]].framework
        self._rows.setdefault(key, Measurement(*key, framework, Status.NOT_RUN))
        super()._note(key, **fields)

    def _note_all(self, workload: Workload, name: str, status: Status, reason: str) -> None:
        for mode in self.plan.modes_of(workload):
            self._note((workload, mode, name), status=status, reason=reason)

    def _order(self, key: Key) -> tuple[int, ...]:
        workload, mode, name = key
        names = list(IMPLEMENTATIONS)
        plan = self.plan
        return plan.workloads.index(workload), plan.modes.index(mode), names.index(name)

    def _settings(self) -> dict[str, Any]:
        # The number of queries on which each workload is judged; gradients are judged whole.
        judged = {w.name: f"{len(sampled_rows(w))} of {w.T}" for w in self.plan.workloads}
        return {JUDGED_ROWS: judged}
