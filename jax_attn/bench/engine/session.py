"""A run of the bench: judge both sides, then time those that agree in interleaved rounds."""

import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, replace
from typing import Any, Self, TypeAlias

from jax_attn.bench import statistics
from jax_attn.bench.arrays import sampled_batch, sampled_rows
from jax_attn.bench.engine import memory
from jax_attn.bench.engine.plan import BenchPlan
from jax_attn.bench.engine.processes import Processes
from jax_attn.bench.engine.rounds import interleaved, measure_products, measure_reads
from jax_attn.bench.engine.worker import RefusedError, Worker, WorkerError
from jax_attn.bench.implementations import IMPLEMENTATIONS, JAX, REFERENCE
from jax_attn.bench.record import (
    JUDGED_ROWS,
    MATRIX_PRODUCTS,
    READS,
    Measurement,
    Record,
    Status,
)
from jax_attn.bench.workload import CACHED, MODES, PairWorkload, Workload
from jax_attn.environment import describe, version
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.pair.errors import PairError

PEERS = ("equinox", "keras", "torchax", "psutil", "matplotlib")
NOT_TIMED = "not timed"
UNTRUSTED = "untrusted: the pair disagrees"
_JUDGE = "judge"

Key: TypeAlias = tuple[Workload | PairWorkload, str, str]
"""The key of a row: workload, mode, and name of the implementation."""


class Session:
    """One run. Whatever ends it early, `record` returns what was measured so far."""

    def __init__(self, plan: BenchPlan, start: Callable[..., Any] = Worker) -> None:
        self.plan, self.processes = plan, Processes(plan, start)
        self._workloads: tuple[Workload | PairWorkload, ...] = plan.workloads
        self._modes = plan.modes or (*MODES, *CACHED)
        self._verdicts: dict[PairWorkload, dict[str, Any]] = {}  # of a pair
        self._rows: dict[Key, Measurement] = {}
        self._ready: set[Key] = set()  # judged and compiled
        self._dispatch: dict[Key, list[float]] = {}
        self._products: dict[str, float] = {}
        self._reads: dict[str, float] = {}
        self.environment: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.close(*self.processes.workers)

    @property
    def steps(self) -> int:
        """The least number of steps that `run` yields, with one round in each mode."""
        plan = self.plan
        if plan.pair is None:
            modes = sum(len(plan.modes_of(workload)) for workload in plan.workloads)
            return len(plan.workloads) * (2 + len(plan.names)) + modes
        return 1 + (len(plan.lengths) or 1) * (2 + len(plan.names) + (len(plan.modes) or 1))

    def run(self) -> Generator[str, None, None]:
        """Measure everything; yield a description of each step after it. Raises PairError."""
        plan = self.plan
        self.environment = session_environment()
        if plan.pair is not None:
            yield f"judged: {self._judge_pair()}"
        for workload in self._workloads:
            for name in plan.names:
                self._add_rows(workload, name)
            if any(self._rows[key].status is Status.NOT_RUN for key in self._keys(workload)):
                yield from self._measure(workload)
        for name in plan.names if plan.pair is not None and plan.alone else ():
            if name in self.processes.workers:
                self._look_again(name)
                yield f"{name}: compiled again"

    def _measure(self, workload: Workload | PairWorkload) -> Iterator[str]:
        plan, processes = self.plan, self.processes
        if plan.device == "gpu" and plan.pair is None:
            # JAX cannot reset an allocator's peak, as torch can: start new ones.
            processes.close(*(n for n in plan.names if IMPLEMENTATIONS[n].framework == JAX))
        lacks = {name: IMPLEMENTATIONS[name].lacks for name in plan.names}
        processes.load(n for n in plan.names if not all(map(lacks[n], self._workloads)))
        yield f"{workload.name}: workers started"
        workers = processes.for_rooflines(workload.dtype)
        dtype = workload.dtype
        yield from measure_products(workers, dtype, self._products, plan.seed, plan.device)
        if plan.pair is not None:
            measure_reads(workers, self._reads, plan.seed)
        no_reference = self._prepare_judge(workload)
        for name in plan.names:
            if why := lacks[name](workload) or no_reference:
                self._note_all(workload, name, Status.NOT_RUN, why)
            elif name in processes.unloaded:
                self._note_all(workload, name, *processes.unloaded[name])
            else:
                self._prepare(workload, name)
            yield f"{workload.name}: {name} judged"
        for mode in self._modes:
            keys = [(workload, mode, name) for name in plan.names]
            if ready := [key for key in keys if key in self._ready]:
                yield from self._time(ready)

    # --- verdicts ---

    def _judge_pair(self) -> Verdict:
        """Judge the pair at each length, which is a workload; return the worst verdict.

        Raises PairError.
        """
        plan, processes = self.plan, self.processes
        # It may check a whole model, so it has all the time it needs.
        arguments = "pair_judge:PairJudge", plan.pair, plan.lengths
        judge = processes.start(_JUDGE, *arguments, patience=None)
        try:
            processes.digests = judge.ask("load")
            self._modes, self._verdicts = judge.ask("judged", plan.name, plan.modes)
        except WorkerError as error:
            raise PairError(str(error)) from error
        processes.close(_JUDGE)
        self._workloads = tuple(self._verdicts)
        return Verdict.worst(Verdict(judged["verdict"]) for judged in self._verdicts.values())

    def _prepare_judge(self, workload: Workload | PairWorkload) -> str:
        """Run a preset's reference; return "", or why there is none, so that nothing is timed."""
        if isinstance(workload, PairWorkload):
            return ""
        plan, processes = self.plan, self.processes
        if _JUDGE not in processes.workers:
            processes.start(_JUDGE, "judge:Judge")
        try:
            modes = plan.modes_of(workload)
            processes.asker(_JUDGE)("prepare", workload, plan.seed, modes)
        except WorkerError as error:
            return f"no reference to judge by: {error}"
        return ""

    def _judged(self, key: Key, ask: Callable[..., Any]) -> dict[str, Any]:
        """Judge a preset's implementation by its tensors; return fields of its measurement."""
        workload, mode, name = key
        if isinstance(workload, PairWorkload):
            return {}
        judge, tensors = self.processes.asker(_JUDGE), ask("tensors", mode)
        if name == REFERENCE:
            judge("take_own", mode, tensors)
        judged = judge("judge", mode, tensors)
        status = Status.EXCLUDED if judged["verdict"] == Verdict.FAIL else Status.NOT_RUN
        return judged | {"reason": judged["reason"] or NOT_TIMED, "status": status}

    # --- rows ---

    def _keys(self, workload: Workload | PairWorkload, name: str = "") -> list[Key]:
        return [key for key in self._rows if key[0] == workload and name in ("", key[2])]

    def _note(self, key: Key, **fields: Any) -> None:
        self._rows[key] = replace(self._rows[key], **fields)

    def _note_all(
        self, workload: Workload | PairWorkload, name: str, status: Status, reason: str
    ) -> None:
        for key in self._keys(workload, name):
            self._note(key, status=status, reason=reason)

    def _add_rows(self, workload: Workload | PairWorkload, name: str) -> None:
        """Add a row for each mode. Only the port's rows carry the verdict of a pair."""
        row, modes = IMPLEMENTATIONS[name], self._modes
        fields: dict[str, Any] = {"status": Status.NOT_RUN, "reason": NOT_TIMED}
        if isinstance(workload, Workload):
            modes = self.plan.modes_of(workload)
        else:
            judged, is_port = self._verdicts[workload], row.framework == JAX
            reason = judged["reason"]
            fields |= judged | {"reason": reason or NOT_TIMED} if is_port else {}
            if judged["verdict"] == Verdict.FAIL and self.plan.untrusted:
                fields["reason"] = f"{UNTRUSTED}: {reason}"
            elif judged["verdict"] == Verdict.FAIL:
                why = reason if is_port else "the port disagrees"
                fields |= {"status": Status.EXCLUDED, "reason": why}
        for mode in filter(row.modes.__contains__, modes):
            key = workload, mode, name
            self._rows[key] = Measurement(*key, row.framework, **fields)

    def _prepare(self, workload: Workload | PairWorkload, name: str) -> None:
        """Compile every mode, call it once, judge it, and measure its memory."""
        ask = self.processes.asker(name)
        try:
            built = ask("build", workload, self.plan.seed)
        except WorkerError as error:
            self._note_all(workload, name, fate(error), str(error))
            return
        for key in self._keys(workload, name):
            mode = key[1]
            try:
                compile_s, compiler_bytes = ask("compile", mode)
                fields = built | {"compile_s": compile_s, "compiler_bytes": compiler_bytes}
                fields |= {"first_call_s": ask("first_call", mode), "programs": ask("programs")}
                fields |= self._judged(key, ask)
                fields |= {"peak_bytes": ask("peak", mode)}
            except WorkerError as error:
                self._note(key, **built, status=fate(error), reason=str(error))
                continue
            self._note(key, **fields)
            if self._rows[key].status is Status.NOT_RUN:
                self._ready.add(key)

    def _look_again(self, name: str) -> None:
        """Find where a pair's time goes, then measure compilation with a cache on disk.

        Compiling again discards compiled programs, so it comes last.
        """
        ask = self.processes.asker(name)
        first = next((key[0] for key, row in self._rows.items() if row.seconds), None)
        measured = [key for key, row in self._rows.items() if row.seconds and key[0] == first]
        for field, method in (("operations", "operations"), ("warm_compile_s", "warm_compile")):
            for key in (key for key in measured if key[2] == name):
                try:
                    ask("build", key[0], self.plan.seed)
                    self._note(key, **{field: ask(method, key[1])})
                except WorkerError as error:  # the measured times remain valid
                    reasons = filter(None, (self._rows[key].reason, str(error)))
                    self._note(key, reason="; ".join(reasons))

    # --- times ---

    def _time(self, keys: list[Key]) -> Iterator[str]:
        """Time rows of one mode in rounds, and keep the times of those that do not fail."""
        plan, times = self.plan, dict[str, list[float]]()
        workload, mode, _ = keys[0]
        turns = {key[2]: self._turn(key) for key in keys}
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
        ask, dispatched = self.processes.asker(name), self._dispatch.setdefault(key, [])

        def turn() -> float | None:
            try:
                seconds, until_returned = ask("turn", mode)
            except WorkerError as error:
                self._note(key, status=fate(error), reason=str(error))
                return None
            dispatched.append(until_returned)
            return seconds

        return turn

    # --- record ---

    def record(self, interrupted: bool = False) -> Record:
        """Return what was measured, as plain data."""
        plan, best = self.plan, max(self._products.values(), default=None)
        settings = {
            "threads": plan.threads,
            "precision": "highest",
            "device": plan.device,
            "baseline": plan.baseline,
            "rounds": asdict(plan.limits),
            "seed": plan.seed,
            MATRIX_PRODUCTS: dict(self._products),
        }
        if plan.pair is not None:
            settings[READS] = dict(self._reads)
        else:
            # The number of queries on which each workload is judged; gradients are judged whole.
            judged = {
                w.name: f"{len(sampled_batch(w)) * len(sampled_rows(w))} of {w.B * w.T}"
                for w in plan.workloads
            }
            settings[JUDGED_ROWS] = judged
        dtypes = {workload.dtype for workload, _, _ in self._rows}

        def order(key: Key) -> tuple[int, ...]:
            workload, mode, name = key
            names = list(IMPLEMENTATIONS)
            return self._workloads.index(workload), self._modes.index(mode), names.index(name)

        return Record(
            environment=self.environment,
            settings=settings,
            roofline={} if best is None else dict.fromkeys(dtypes, best),
            rows=tuple(self._rows[key] for key in sorted(self._rows, key=order)),
            interrupted=interrupted,
        )


def fate(error: WorkerError) -> Status:
    """Return the status for a worker's error; a refusal is not a failure."""
    return Status.NOT_RUN if isinstance(error, RefusedError) else Status.FAILED


def session_environment() -> dict[str, Any]:
    """Return the machine, versions, free memory and load."""
    here = describe()
    here["packages"] |= {name: v for name in PEERS if (v := version(name)) is not None}
    here["memory_available_bytes"] = memory.available()
    here["load_average"] = os.getloadavg()[0]
    return here
