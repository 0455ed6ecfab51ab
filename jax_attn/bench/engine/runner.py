"""One implementation in a process of its own: the requests that the bench makes of it."""

import gc
import importlib
import operator
import time
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import numpy as np

from jax_attn.bench.arrays import input_names, sampled_cotangent, sampled_rows, seeded_arrays
from jax_attn.bench.implementations import IMPLEMENTATIONS
from jax_attn.bench.programs.program import Program, UnsuitedError
from jax_attn.bench.workload import BACKWARD, Workload

TURN_SECONDS = 0.02  # least duration of a turn: a short call is timed as often as fits
# The turns of others leave caches cold, which costs milliseconds: negligible for a longer call.
COLD_MATTERS_SECONDS = 0.2
# torch's threads spin for about 12 ms after their work; the next turn must not share the cores.
_REST_SECONDS = 0.02


class Runner:
    """Server of one request at a time: `load` first, then `build`, then the others."""

    program: Program
    workload: Workload | None  # None for a plain matrix product

    def __init__(self, name: str, device: str, threads: int) -> None:
        self.implementation = IMPLEMENTATIONS[name]
        self.device, self.threads = device, threads
        self.engine: Any = None

    def load(self) -> None:
        """Import the package and its framework. Raises ImportError, whatever the package raises."""
        try:
            for module in self.implementation.needs:
                importlib.import_module(module)
        except Exception as error:
            raise ImportError(f"does not import: {type(error).__name__}: {error}") from error
        framework = self.implementation.framework
        engine = resolve_name(f"jax_attn.bench.engine.{framework}_engine:Engine")
        self.engine = engine(self.device, self.threads)

    def build(self, workload: Workload, seed: int) -> dict[str, Any]:
        """Build the program and load its inputs; return fields of its measurement."""
        self._drop()
        builder = self.implementation.builder(workload)
        placed = {name: self.engine.place(a) for name, a in seeded_arrays(workload, seed).items()}
        cotangent = placed.pop("cotangent", None)
        self.workload, self.seed = workload, seed
        self.program = resolve_name(builder)(workload, placed, **self.implementation.options)
        names = input_names(workload)
        self.engine.load(self.program, [placed[name] for name in names], cotangent)
        return {"kernel": self.program.kernel, "cache_bytes": self.program.cache_bytes}

    def build_product(self, size: int, dtype: str) -> None:
        """Build a product of two matrices (size, size) in place of a workload."""
        self._drop()
        rng = np.random.default_rng(0)
        arrays = [rng.standard_normal((size, size), np.float32) for _ in range(2)]
        placed = [self.engine.place(a.astype(np.dtype(dtype))) for a in arrays]
        self.program = Program(operator.matmul, {}, writes_scores=False)
        self.engine.load(self.program, placed, None)

    def build_sum(self, size: int) -> None:
        """Build a sum over an array of `size` bytes in place of a workload."""
        self._drop()
        array = self.engine.place(np.ones(size // 4, np.float32))
        self.program = Program(_summed, {}, writes_scores=False)
        self.engine.load(self.program, [array], None)

    def _drop(self) -> None:
        self.workload = None
        vars(self).pop("program", None)
        self.engine.let_go()
        gc.collect()

    def compile(self, mode: str) -> tuple[float | None, int | None]:
        """Compile a mode; return its seconds and the bytes of the compiler's temporaries.

        Raises UnsuitedError if the scores need more than half of the free memory, because
        measurements on a machine that swaps are meaningless.
        """
        if self.workload and self.program.writes_scores:
            need = self.workload.scores_bytes(mode)
            left = self.engine.available()
            if need > left / 2:
                raise UnsuitedError(
                    f"writes every score: {need / 2**30:.1f} GiB at least, "
                    f"more than half of the {left / 2**30:.1f} GiB left"
                )
        return self.engine.compile(mode)

    def first_call(self, mode: str) -> float:
        """Return the seconds of the first call after compiling."""
        started = time.perf_counter()
        self.engine.call(mode)
        return time.perf_counter() - started

    def peak(self, mode: str) -> int | None:
        return self.engine.peak(mode)

    def tensors(self, mode: str) -> dict[str, dict[str, np.ndarray]]:
        """Return the sampled rows of the output, and the gradients of inputs and weights.

        The result maps kind → name → array. The gradients belong to a cotangent that is zero except
        on the sampled rows. Raises ValueError, naming every tensor that is not finite everywhere or
        not of the workload's dtype.
        """
        w, cotangent = self.workload, None
        assert w is not None, "a workload is built before its tensors are asked for"
        if mode == BACKWARD:
            cotangent = sampled_cotangent(w, seeded_arrays(w, self.seed)["cotangent"])
        output, gradients = self.engine.tensors(mode, cotangent)
        inputs = input_names(w) if mode == BACKWARD else ()
        weights = self.program.weights if mode == BACKWARD else ()
        named = dict(zip((*inputs, *weights), gradients, strict=True))
        _check({"output": output} | {f"grad {name}": a for name, a in named.items()}, w)
        by_kind = {"output": {"output": output[:, sampled_rows(w)]}}
        if mode == BACKWARD:
            by_kind["gradient of input"] = {name: named.pop(name) for name in inputs}
            by_kind["gradient of parameter"] = dict(self.program.canonical(named))
        return by_kind

    def turn(self, mode: str) -> tuple[float, float]:
        """Time a round; return as `timed_round` does."""
        return timed_round(lambda seconds: self.engine.turn(mode, seconds))


def _summed(x: Any) -> Any:
    return x.sum()


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
    problems += [
        f"{name}: expected finite numbers, got {np.count_nonzero(~finite)} others"
        for name, a in tensors.items()
        if not (finite := np.isfinite(a)).all()
    ]
    if problems:
        raise ValueError("; ".join(problems))
