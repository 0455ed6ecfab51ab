"""A run of a user's own pair: judge it by `parity.check`, then time it in interleaved rounds."""

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from jax_attn.bench.arrays import SEED
from jax_attn.bench.engine.rounds import Limits, measure_products, measure_reads
from jax_attn.bench.engine.run import NOT_TIMED, Key, Run, environment, session_environment
from jax_attn.bench.engine.worker import PATIENCE_SECONDS, Worker, WorkerError
from jax_attn.bench.implementations import JAX, OURS, TORCH
from jax_attn.bench.pair.pair import Pair
from jax_attn.bench.pair.ways import EAGER, WAYS
from jax_attn.bench.record import READS, Measurement, Status
from jax_attn.bench.workload import CACHED, PairError, PairWorkload
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.judge.text import joined

# framework -> the implementation whose process times its matrix products
_PRODUCTS = {TORCH: EAGER, JAX: OURS}
UNTRUSTED = "untrusted: the pair disagrees"


@dataclass(frozen=True)
class PairPlan:
    """The settings of a pair's run.

    named: the function that makes the pair, the checkpoint, or the pair, as `made` takes it.
    ways: names in WAYS. modes: the pair's usual ones unless given. lengths: lengths of the inputs.
    untrusted: whether to time a pair that disagrees. alone: whether each way runs in a process of
    its own, where compiled programs can be discarded.
    """

    named: str | Pair
    threads: int
    ways: tuple[str, ...] = tuple(WAYS)
    modes: tuple[str, ...] = ()
    baseline: str = EAGER
    device: str = "cpu"
    limits: Limits = field(default_factory=Limits)
    seed: int = SEED
    lengths: tuple[int, ...] = ()
    untrusted: bool = False
    alone: bool = True

    @property
    def name(self) -> str:
        """The name of the pair in the record."""
        return self.named if isinstance(self.named, str) else "the pair"

    @property
    def names(self) -> tuple[str, ...]:
        """The names in WAYS that are run, always with the baseline."""
        return tuple(name for name in WAYS if name in {*self.ways, self.baseline})


class PairSession(Run):
    """A run of `PairPlan`."""

    plan: PairPlan

    def __init__(self, plan: PairPlan, start: Callable[..., Any] = Worker) -> None:
        super().__init__(plan, start)
        self._modes: tuple[str, ...] = plan.modes
        self._reads: dict[str, float] = {}

    @property
    def steps(self) -> int:
        """The least number of steps that `run` yields, with one round in each mode."""
        modes, lengths = len(self.plan.modes) or 1, len(self.plan.lengths) or 1
        return 3 + lengths * (len(self.plan.names) + modes)

    def run(self) -> Generator[str, None, None]:
        """Measure everything; yield a description of each step after it. Raises PairError."""
        plan = self.plan
        self.environment = session_environment()
        verdicts, expected = self._judge()
        yield f"judged: {Verdict.worst(Verdict(judged['verdict']) for judged in verdicts.values())}"
        for workload, judged in verdicts.items():
            for name in plan.names:
                self._note_all(workload, name, judged)
        workloads = [w for w, judged in verdicts.items() if self._is_timed(judged)]
        if not workloads:
            return
        yield from self._measure_products(workloads[0].dtype)
        # Two at a time: one imports while the other reads its files. In one process only one at a
        # time, because they would share random state.
        with ThreadPoolExecutor(2 if plan.alone else 1) as pool:
            list(pool.map(lambda name: self._load(name, expected), plan.names))
        yield "workers started"
        for workload in workloads:
            for name in filter(self._workers.get, plan.names):
                self._prepare(workload, name)
                yield f"{workload.name}: {name} compiled"
            for mode in self._modes:
                rows = {name: self._rows.get((workload, mode, name)) for name in plan.names}
                waiting = [n for n, row in rows.items() if row and row.status is Status.NOT_RUN]
                yield from self._time(workload, mode, waiting)
        for name in filter(self._workers.get, plan.names if plan.alone else ()):
            self._look_again(workloads[0], name)
            yield f"{name}: compiled again"

    def _is_timed(self, judged: Mapping[str, Any]) -> bool:
        return self.plan.untrusted or judged["verdict"] != Verdict.FAIL

    def _judge(self) -> tuple[dict[PairWorkload, dict[str, Any]], dict[str, str]]:
        """Return the fields of the verdict by workload, and the digests of the judged pair."""
        plan = self.plan
        maker = "jax_attn.bench.pair.runner:PairJudge", plan.named, plan.lengths, plan.threads
        judge = self._started("judge", *maker, patience=None)  # it may check a whole model
        try:
            expected, found = judge.ask("load"), judge.ask("about")
            self._modes = plan.modes or found["usual_modes"]
            if lacking := [mode for mode in self._modes if mode not in found["modes"]]:
                known = ", ".join(found["modes"])
                got = f"expected modes among {known}, got {joined(lacking)}"
                whys = dict.fromkeys(_LACKS[mode in CACHED] for mode in lacking)
                raise PairError(f"{plan.name}: {got}: {'; '.join(whys)}")
            lengths = [*found["inputs"]][: found["checks"]]
            judged = [judge.ask("judge", length) for length in lengths]
            workloads = [
                PairWorkload(
                    f"{plan.name}, length {length}" if length else plan.name,
                    inputs,
                    found["dtype"],
                    tuple(judge.ask("flops", length, self._modes).items()),
                    length,
                    tuple(judge.ask("reads", length, self._modes).items()),
                )
                for length, inputs in found["inputs"].items()
            ]
        except WorkerError as error:
            raise PairError(str(error)) from error
        self._workers.pop("judge").close()
        return dict(zip(workloads, itertools.cycle(judged), strict=False)), expected

    def _started(
        self,
        name: str,
        make: str,
        *arguments: Any,
        variables: Mapping[str, str] = {},
        patience: float | None = PATIENCE_SECONDS,
    ) -> Any:
        self._workers[name] = worker = self._start(
            name,
            make,
            *arguments,
            threads=self.plan.threads,
            environment=environment(variables, self.plan.device),
            patience=patience,
        )
        return worker

    def _measure_products(self, dtype: str) -> Iterator[str]:
        """Measure the rooflines in both frameworks, each in a process of its own."""
        plan, workers = self.plan, {}
        variables = {"JAX_ENABLE_X64": "1"} if dtype == "float64" else {}
        for framework, name in _PRODUCTS.items():
            runner = "jax_attn.bench.engine.runner:Runner", name, plan.device, plan.threads
            worker = self._started(f"products by {framework}", *runner, variables=variables)
            with contextlib.suppress(WorkerError):  # the other framework's rate remains
                worker.ask("load")
                workers[framework] = worker
        yield from measure_products(workers, dtype, self._rates, plan.seed)
        measure_reads(workers, self._reads, plan.seed)
        for framework in _PRODUCTS:
            self._workers.pop(f"products by {framework}").close()

    def _load(self, name: str, expected: Mapping[str, str]) -> None:
        """Start a worker, and fail it unless its pair equals the judged one."""
        plan, way = self.plan, WAYS[name]
        runner = "jax_attn.bench.pair.runner:PairRunner"
        arguments = plan.named, plan.lengths, name, plan.device, plan.threads
        worker = self._started(name, runner, *arguments, variables=way.environment)
        try:
            got = worker.ask("load")
        except WorkerError as error:
            self._fail(name, str(error))
            return
        other = [key for key in expected.keys() | got.keys() if expected.get(key) != got.get(key)]
        if other:
            self._fail(
                name,
                f"{plan.name}: expected the same arrays from every call, got different ones for "
                f"{', '.join(sorted(other)[:5])}; seed the random numbers that it draws",
            )

    def _prepare(self, workload: PairWorkload, name: str) -> None:
        """Compile every mode, call it once, and measure its memory."""
        ask = self._asker(name)
        for key in self._keys(workload, name):
            _, mode, _ = key
            try:
                ask("place", workload.length)
                compile_s, compiler_bytes = ask("compile", mode)
                fields = {"compile_s": compile_s, "compiler_bytes": compiler_bytes}
                fields |= {"first_call_s": ask("first_call", mode)}
                fields |= {"programs": ask("programs"), "peak_bytes": ask("peak", mode)}
            except WorkerError as error:
                self._note(key, status=Status.FAILED, reason=str(error))
                continue
            self._note(key, **fields)

    def _look_again(self, workload: PairWorkload, name: str) -> None:
        """Find where the time goes, then measure compilation with a cache on disk."""
        ask, keys = self._asker(name), self._keys(workload, name)
        measured = [key for key in keys if self._rows[key].status is Status.MEASURED]
        # Compiling again discards compiled programs, so it comes last.
        for field_name, method in (
            ("operations", "operations"),
            ("warm_compile_s", "warm_compile"),
        ):
            for key in measured:
                try:
                    ask("place", workload.length)
                    self._note(key, **{field_name: ask(method, key[1])})
                except WorkerError as error:  # the measured times remain valid
                    reasons = filter(None, (self._rows[key].reason, str(error)))
                    self._note(key, reason="; ".join(reasons))

    def _keys(self, workload: PairWorkload, name: str) -> list[Key]:
        return [key for key in self._rows if (key[0], key[2]) == (workload, name)]

    # --- rows ---

    def _note_all(self, workload: PairWorkload, name: str, judged: Mapping[str, Any]) -> None:
        """Add a row for each mode that the way has. Only rows of the port carry the verdict."""
        way = WAYS[name]
        for mode in (m for m in self._modes if m in way.modes):
            row = Measurement(workload, mode, name, way.framework, Status.NOT_RUN, NOT_TIMED)
            if way.framework == JAX:
                row = replace(row, **{**judged, "reason": judged["reason"] or NOT_TIMED})
            if not self._is_timed(judged):
                why = judged["reason"] if way.framework == JAX else "the port disagrees"
                row = replace(row, status=Status.EXCLUDED, reason=why)
            elif judged["verdict"] == Verdict.FAIL:
                row = replace(row, reason=f"{UNTRUSTED}: {judged['reason']}")
            self._rows[workload, mode, name] = row

    def _fail(self, name: str, reason: str) -> None:
        self._workers.pop(name).close()
        for key in self._rows:
            if key[2] == name:
                self._note(key, status=Status.FAILED, reason=reason)

    def _order(self, key: Key) -> tuple[int, ...]:
        workload, mode, name = key
        workloads = list(dict.fromkeys(workload for workload, _, _ in self._rows))
        return workloads.index(workload), self._modes.index(mode), list(WAYS).index(name)

    def _settings(self) -> dict[str, Any]:
        return {READS: dict(self._reads)}


# Whether a mode has a cache -> why a pair lacks it.
_LACKS = {
    True: "the pair has no cache; only the generative model of a checkpoint has one",
    False: "gradients need parameters, and none may be frozen",
}
