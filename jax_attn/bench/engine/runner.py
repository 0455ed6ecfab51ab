"""One implementation in a process of its own: the requests that the bench makes of it."""

import gc
import importlib
import operator
import statistics
import tempfile
import time
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, TypeVar

import numpy as np

from jax_attn.bench.arrays import (
    input_names,
    sampled_batch,
    sampled_cotangent,
    sampled_rows,
    seeded_arrays,
)
from jax_attn.bench.engine import memory
from jax_attn.bench.implementations import IMPLEMENTATIONS
from jax_attn.bench.programs.program import TimedProgram, UnsuitedError
from jax_attn.bench.workload import BACKWARD, CACHE, DECODE, PREFILL, PairWorkload, Workload
from jax_attn.transfer import as_numpy

T = TypeVar("T")
TURN_SECONDS = 0.02  # least duration of a turn: a short call is timed as often as fits
# The turns of others leave caches cold, which costs milliseconds: negligible for a longer call.
COLD_MATTERS_SECONDS = 0.2
# torch's threads spin for about 12 ms after their work; the next turn must not share the cores.
_REST_SECONDS = 0.02
_ENGINES = {"jax": "jax_engine:JaxEngine", "torch": "torch_engine:TorchEngine"}


class Runner:
    """Server of one request at a time: `load` first, then `build`, then the others.

    pair: (what `made` takes, lengths) of a user's pair; None for the workloads of presets.
    """

    program: TimedProgram  # of a preset's workload
    workload: Workload | PairWorkload | None = None  # None for a plain product or sum

    def __init__(
        self, name: str, device: str, threads: int, pair: tuple[Any, ...] | None = None
    ) -> None:
        self.implementation = IMPLEMENTATIONS[name]
        self.device, self.threads, self.pair = device, threads, pair
        self.engine: Any = None

    def load(self) -> dict[str, str]:
        """Import the package and its framework, and make the pair; return the pair's digests.

        Raises ImportError, whatever the package raises, and PairError.
        """
        try:
            for module in self.implementation.needs:
                importlib.import_module(module)
        except Exception as error:
            raise ImportError(f"does not import: {type(error).__name__}: {error}") from error
        framework = self.implementation.framework
        engine = resolve_name(f"jax_attn.bench.engine.{_ENGINES[framework]}")
        if self.pair is None:
            self.engine = engine(self.device, self.threads)
            return {}
        from jax_attn.bench.pair.made import made
        from jax_attn.bench.pair.pair import digests

        pair = made(*self.pair)
        by_name = digests(pair)
        self.engine = engine(self.device, self.threads)
        self.side = resolve_name(self.implementation.pair)(pair, self.device)
        return by_name

    def build(self, workload: Workload | PairWorkload, seed: int) -> dict[str, Any]:
        """Load the workload's inputs, unless they are; return fields of its measurement."""
        if isinstance(workload, PairWorkload):
            if workload != self.workload:
                self.engine.take(*self.side.at(workload.length), self.side.compiled)
                self.workload = workload
            return {}
        self.drop()
        builder = self.implementation.builder(workload)
        placed = {name: self.engine.place(a) for name, a in seeded_arrays(workload, seed).items()}
        cotangent = placed.pop("cotangent", None)
        self.workload = workload
        self.program = resolve_name(builder)(workload, placed, **self.implementation.options)
        names = input_names(workload)
        self.engine.load(self.program, [placed[name] for name in names], cotangent)
        return {"kernel": self.program.kernel, "cache_bytes": self.program.cache_bytes}

    def build_product(self, size: int, dtype: str) -> None:
        """Build a product of two matrices (size, size) in place of a workload."""
        rng = np.random.default_rng(0)
        arrays = (rng.standard_normal((size, size), np.float32) for _ in range(2))
        self._build_plain(operator.matmul, *(a.astype(np.dtype(dtype)) for a in arrays))

    def build_sum(self, size: int) -> None:
        """Build a sum over an array of `size` bytes in place of a workload."""
        self._build_plain(lambda x: x.sum(), np.ones(size // 4, np.float32))

    def _build_plain(self, function: Callable[..., Any], *arrays: np.ndarray) -> None:
        self.drop()
        program = TimedProgram(function, {}, writes_scores=False)
        self.engine.load(program, [self.engine.place(a) for a in arrays], None)

    def drop(self) -> None:
        """Free what was built."""
        self.workload = None
        vars(self).pop("program", None)
        self.engine.let_go()
        gc.collect()

    def compile(self, mode: str) -> tuple[float | None, int | None]:
        """Compile; return the seconds and the bytes of temporaries, each None if unknown.

        Raises UnsuitedError if the scores need more than half of the free memory, because
        measurements on a machine that swaps are meaningless.
        """
        if isinstance(self.workload, Workload) and self.program.writes_scores:
            need = self.workload.scores_bytes(mode)
            left = self.engine.available()
            if need > left / 2:
                raise UnsuitedError(
                    f"writes every score: {need / 2**30:.1f} GiB at least, "
                    f"more than half of the {left / 2**30:.1f} GiB left"
                )
        self._prepare(mode)
        self._compiled_before = self.engine.compiled()
        return self.engine.compile(mode)

    def programs(self) -> int | None:
        """Return how many programs of a pair were compiled since the last `compile`.

        None for a preset's workload, which is one program, and if this way never compiles.
        """
        if self.pair is None or not self.engine.is_compiled:
            return None
        return self.engine.compiled() - self._compiled_before

    def first_call(self, mode: str) -> float:
        """Return the seconds of the first call after compiling."""
        self._prepare(mode)
        started = time.perf_counter()
        self.call(mode)
        return time.perf_counter() - started

    def peak(self, mode: str) -> int | None:
        """Return the most bytes that a call holds beyond those before it; None if unknown."""
        self._prepare(mode)
        if self.device == "cpu":
            return memory.peak_during(lambda: self.call(mode))
        # JAX cannot reset its allocator's peak, and the modes of a pair share a process.
        return (
            None if self.pair is not None else self.engine.peak_on_device(lambda: self.call(mode))
        )

    def tensors(self, mode: str) -> dict[str, dict[str, np.ndarray]]:
        """Return the sampled rows of a workload's output, and gradients of inputs and weights.

        The result maps kind → name → array. The gradients belong to a cotangent that is zero except
        on the sampled rows. Raises ValueError, naming every tensor that is not finite everywhere or
        not of the workload's dtype, or not zero where the cotangent of its row of the batch is.
        """
        w = self.workload
        assert isinstance(w, Workload), "a workload is built before its tensors are asked for"
        state, cotangent = self.engine.state, self.engine.state.get("cotangent")
        if mode == BACKWARD:
            state["cotangent"] = self.engine.put(sampled_cotangent(w, as_numpy(cotangent)))
        result = self.call(mode)
        state["cotangent"] = cotangent
        # Gradients, and a cache of JAX, come after the output.
        output = as_numpy(result[0] if isinstance(result, tuple) else result)
        inputs, of_weights = (
            (input_names(w), self.program.weights) if mode == BACKWARD else ((), ())
        )
        gradients = map(as_numpy, result[1] if mode == BACKWARD else ())
        named = dict(zip((*inputs, *of_weights), gradients, strict=True))
        _check({"output": output} | {f"grad {name}": a for name, a in named.items()}, w)
        batch = sampled_batch(w)
        by_kind = {"output": {"output": output[np.ix_(batch, sampled_rows(w))]}}
        if mode == BACKWARD:
            by_kind["gradient of input"] = {name: named.pop(name)[batch] for name in inputs}
            by_kind["gradient of parameter"] = dict(self.program.canonical(named))
        return by_kind

    def turn(self, mode: str) -> tuple[float, float]:
        """Time a round; return as `timed_round` does."""
        self._prepare(mode)
        start, finish = self.engine.start, self.engine.finish
        with self.engine.within(mode):
            return timed_round(lambda seconds: timed_turn(lambda: start(mode), finish, seconds))

    def operations(self, mode: str) -> tuple[tuple[str, str, float], ...]:
        """Return where a call of a pair spends its time, as `Measurement.operations`."""
        self._prepare(mode)
        return self.side.operations(mode, lambda: self.call(mode))

    def warm_compile(self, mode: str) -> float | None:
        """Return the seconds to compile again with the compiler's cache on disk.

        Discards the compiled programs, so it must be the last request.
        """
        if not self.engine.is_compiled:
            return None
        with tempfile.TemporaryDirectory(prefix="jax-attn-bench-") as folder:
            self._prepare(mode)
            self.engine.keep(folder)
            self.engine.forget()
            self.engine.compile(mode)
            self.engine.forget()
            seconds, _ = self.engine.compile(mode)
            return seconds

    def _prepare(self, mode: str) -> None:
        """Prepare what a call needs besides its program: decode needs the prompt in the cache."""
        state = self.engine.state
        if mode == DECODE and self.pair is not None and CACHE not in state:
            _, state[CACHE] = self.call(PREFILL)

    def call(self, mode: str) -> Any:
        """Return the finished result of a call."""
        with self.engine.within(mode):
            result = self.engine.start(mode)
            self.engine.finish(result)
        return result


def timed_turn(
    start: Callable[[], T], finish: Callable[[T], object], seconds: float
) -> tuple[float, float]:
    """Return the median seconds of a call, and the median seconds until the call returns.

    A call may return before its result is ready. The medians are over as many calls as begin within
    `seconds`, and over at least one.

    start: makes the call. finish: waits for its result.
    """
    taken: list[float] = []
    dispatched: list[float] = []
    end = time.perf_counter() + seconds
    while not taken or time.perf_counter() < end:
        started = time.perf_counter()
        result = start()
        returned = time.perf_counter()
        finish(result)
        taken.append(time.perf_counter() - started)
        dispatched.append(returned - started)
    return statistics.median(taken), statistics.median(dispatched)


def timed_round(turn: Callable[[float], tuple[float, float]]) -> tuple[float, float]:
    """Return the median seconds of a call and of its dispatch, once the threads are at rest.

    The first call does not count if it is so short that cold caches would distort it.

    turn: maps the seconds that a turn may take to the result of `timed_turn`.
    """
    gc.disable()
    try:
        first = turn(0.0)
        return turn(TURN_SECONDS) if first[0] < COLD_MATTERS_SECONDS else first
    finally:
        gc.enable()
        time.sleep(_REST_SECONDS)


def _check(tensors: dict[str, np.ndarray], workload: Workload) -> None:
    """Raise ValueError unless the whole tensors are finite and of the workload's dtype.

    Later, only their sampled rows are judged.
    """
    problems = [
        f"{name}: expected {workload.dtype}, got {a.dtype}"
        for name, a in tensors.items()
        if a.dtype != np.dtype(workload.dtype)
    ]
    unjudged = np.setdiff1d(np.arange(workload.B), sampled_batch(workload))
    problems += [
        f"{name}: expected zeros where the cotangent is zero"
        for name in map("grad {}".format, input_names(workload))
        if name in tensors and tensors[name][unjudged].any()
    ]
    problems += [
        f"{name}: expected finite numbers, got {np.count_nonzero(~finite)} others"
        for name, a in tensors.items()
        if not (finite := np.isfinite(a)).all()
    ]
    if problems:
        raise ValueError("; ".join(problems))
