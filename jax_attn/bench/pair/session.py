"""A run of a user's own pair: judged by `parity.check`, then timed in interleaved rounds."""

from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jax_attn.bench import statistics
from jax_attn.bench.arrays import SEED
from jax_attn.bench.engine.rounds import Limits, interleaved, measure_products
from jax_attn.bench.engine.session import environment, session_environment
from jax_attn.bench.engine.worker import Worker, WorkerError
from jax_attn.bench.implementations import JAX
from jax_attn.bench.pair.made import Pair
from jax_attn.bench.pair.ways import EAGER, WAYS
from jax_attn.bench.record import MATRIX_PRODUCTS, Measurement, Record, Status
from jax_attn.bench.workload import PAIR_MODES, PairError, PairWorkload
from jax_attn.parity.judge.compare import Verdict

# framework -> the implementation whose process also times its matrix products
_PRODUCTS = {"torch": "torch eager", "jax": "jax-attn"}
UNTRUSTED = "untrusted: the pair disagrees"


@dataclass(frozen=True)
class PairPlan:
    """named: the function that makes the pair, or the pair, as `made` takes it. ways: of WAYS.

    untrusted: time a pair that disagrees, too.
    """

    named: str | Pair
    threads: int
    ways: tuple[str, ...] = tuple(WAYS)
    modes: tuple[str, ...] = PAIR_MODES
    baseline: str = EAGER
    device: str = "cpu"
    limits: Limits = field(default_factory=Limits)
    seed: int = SEED
    untrusted: bool = False

    @property
    def name(self) -> str:
        """What the pair is called in the record."""
        return self.named if isinstance(self.named, str) else "the pair"

    @property
    def names(self) -> tuple[str, ...]:
        """Those of WAYS that are run; the baseline always is."""
        return tuple(name for name in WAYS if name in {*self.ways, self.baseline})


class PairSession:
    """One run. Whatever ends it early, `record` returns what was measured until then."""

    def __init__(self, plan: PairPlan, start: Callable[..., Any] = Worker) -> None:
        self.plan, self._start = plan, start
        self._workers: dict[str, Any] = {}
        self._rows: dict[tuple[str, str], Measurement] = {}
        self._rates: dict[str, float] = {}
        self.environment: dict[str, Any] = {}

    def __enter__(self) -> "PairSession":
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
        return 3 + len(self.plan.names) + len(self.plan.modes)

    def run(self) -> Generator[str, None, None]:
        """Measure everything; yields after each step what was done. Raises PairError."""
        plan = self.plan
        self.environment = session_environment()
        judge = self._started("judge", "jax_attn.bench.pair.runner:PairJudge", plan.threads)
        try:
            expected = judge.ask("load")
            found = judge.ask("judge")
            counts = judge.ask("flops", plan.modes)
        except WorkerError as error:
            raise PairError(str(error)) from error
        self._workers.pop("judge").close()
        judged: dict[str, Any] = found["judged"]
        counted = tuple(counts.items())
        workload = PairWorkload(plan.name, found["inputs"], found["dtype"], counted)
        yield f"judged: {judged['verdict']}"
        trusted = judged["verdict"] != Verdict.FAIL
        for name in plan.names:
            self._note_all(workload, name, judged, trusted=trusted)
        if not (trusted or plan.untrusted):
            return
        yield from self._measure_products(found["dtype"])
        with ThreadPoolExecutor(2) as pool:  # one imports while another reads its files
            list(pool.map(lambda name: self._load(name, expected), plan.names))
        yield "workers started"
        for name in filter(self._workers.get, plan.names):
            self._prepare(name)
            yield f"{name}: compiled"
        for mode in plan.modes:
            yield from self._time(mode)

    def _started(self, name: str, make: str, *arguments: Any, **variables: str) -> Any:
        settings = environment(variables, self.plan.device)
        worker = self._start(
            name, make, self.plan.named, *arguments, threads=self.plan.threads, environment=settings
        )
        self._workers[name] = worker
        return worker

    def _measure_products(self, dtype: str) -> Iterator[str]:
        """The roofline, by the two frameworks, each in a process of its own."""
        plan, workers = self.plan, {}
        for framework, name in _PRODUCTS.items():
            runner = "jax_attn.bench.engine.runner:Runner", name, plan.device, plan.threads
            variables = environment({}, plan.device)
            worker = self._start(name, *runner, threads=plan.threads, environment=variables)
            workers[framework] = self._workers[f"products by {framework}"] = worker
            worker.ask("load")
        yield from measure_products(workers, dtype, self._rates, plan.seed)
        for framework in _PRODUCTS:
            self._workers.pop(f"products by {framework}").close()

    def _load(self, name: str, expected: Mapping[str, str]) -> None:
        """Start a worker; its pair must be the one that was judged."""
        plan, way = self.plan, WAYS[name]
        runner = "jax_attn.bench.pair.runner:PairRunner"
        worker = self._started(name, runner, name, plan.device, plan.threads, **way.environment)
        try:
            got = worker.ask("load")
        except WorkerError as error:
            self._fail(name, str(error))
            return
        other = [key for key in expected.keys() | got.keys() if expected.get(key) != got.get(key)]
        if other:
            self._fail(
                name,
                f"{plan.name}: expected the same arrays from every call, got others for "
                f"{', '.join(sorted(other)[:5])}; seed what it draws",
            )

    def _prepare(self, name: str) -> None:
        """Compile, and call for the first time."""
        for mode in (m for m in self.plan.modes if (m, name) in self._rows):
            ask = self._workers[name].ask
            try:
                compile_s, compiler_bytes = ask("compile", mode)
                fields = {"compile_s": compile_s, "compiler_bytes": compiler_bytes}
                fields |= {"first_call_s": ask("first_call", mode), "peak_bytes": ask("peak", mode)}
            except WorkerError as error:
                self._note(mode, name, status=Status.FAILED, reason=str(error))
                continue
            self._note(mode, name, **fields)

    def _time(self, mode: str) -> Iterator[str]:
        plan = self.plan
        turns = {
            name: self._turn(mode, name)
            for name in plan.names
            if (row := self._rows.get((mode, name))) and row.status is Status.NOT_RUN
        }
        times: dict[str, list[float]] = {}
        try:
            for done in interleaved(turns, times, plan.baseline, plan.limits, plan.seed):
                yield f"{mode}, round {done}"
        finally:
            whole = {n: t for n, t in times.items() if self._rows[mode, n].status is Status.NOT_RUN}
            for name, seconds in whole.items():
                paired = statistics.shared(whole.get(plan.baseline, []), seconds)
                ratio = statistics.paired_ratio(*paired, plan.seed) if paired[0] else None
                reason = self._rows[mode, name].reason
                reason = "" if reason == _NOT_TIMED else reason
                fields = {"seconds": tuple(seconds), "ratio": ratio, "reason": reason}
                self._note(mode, name, status=Status.MEASURED, **fields)

    def _turn(self, mode: str, name: str) -> Callable[[], float | None]:
        def turn() -> float | None:
            try:
                return self._workers[name].ask("turn", mode)[0]
            except WorkerError as error:
                self._note(mode, name, status=Status.FAILED, reason=str(error))
                return None

        return turn

    # --- rows ---

    def _note_all(
        self, workload: PairWorkload, name: str, judged: Mapping[str, Any], *, trusted: bool
    ) -> None:
        """A row for each mode that the way has. The verdict is on the port alone."""
        way = WAYS[name]
        for mode in (m for m in self.plan.modes if m in way.modes):
            row = Measurement(workload, mode, name, way.framework, Status.NOT_RUN, _NOT_TIMED)
            if way.framework == JAX:
                row = replace(row, **{**judged, "reason": judged["reason"] or _NOT_TIMED})
            if not trusted and not self.plan.untrusted:
                why = judged["reason"] if way.framework == JAX else "the port disagrees"
                row = replace(row, status=Status.EXCLUDED, reason=why)
            elif not trusted:
                row = replace(row, reason=f"{UNTRUSTED}: {judged['reason']}")
            self._rows[mode, name] = row

    def _note(self, mode: str, name: str, **fields: Any) -> None:
        self._rows[mode, name] = replace(self._rows[mode, name], **fields)

    def _fail(self, name: str, reason: str) -> None:
        self._workers.pop(name).close()
        for mode, other in self._rows:
            if other == name:
                self._note(mode, name, status=Status.FAILED, reason=reason)

    def record(self, interrupted: bool = False) -> Record:
        """What was measured, as plain data."""
        plan, best = self.plan, max(self._rates.values(), default=None)
        dtypes = {row.workload.dtype for row in self._rows.values()}
        order = {name: i for i, name in enumerate(WAYS)}
        keys = sorted(self._rows, key=lambda key: (plan.modes.index(key[0]), order[key[1]]))
        settings = {
            "threads": plan.threads,
            "precision": "highest",
            "device": plan.device,
            "baseline": plan.baseline,
            "rounds": asdict(plan.limits),
            "seed": plan.seed,
            MATRIX_PRODUCTS: dict(self._rates),
        }
        return Record(
            environment=self.environment,
            settings=settings,
            roofline={} if best is None else dict.fromkeys(dtypes, best),
            rows=tuple(self._rows[key] for key in keys),
            interrupted=interrupted,
        )


_NOT_TIMED = "not timed"
