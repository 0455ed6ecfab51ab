"""Run a JAX `Program`: compile it, time it, measure its memory, and return its arrays."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.bench.engine import memory
from jax_attn.bench.engine.turn import timed_turn
from jax_attn.bench.programs.program import Program
from jax_attn.bench.workload import BACKWARD, CACHED, FORWARD


def with_gradients(call: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, Any]]:
    """Return a function (cotangent, *leaves) -> (output, gradients of the leaves)."""

    def step(cotangent: jax.Array, *leaves: jax.Array) -> tuple[jax.Array, Any]:
        output, vjp = jax.vjp(call, *leaves)
        return output, vjp(cotangent)

    return step


class Engine:
    """One program at a time, jitted on a flat tuple of leaves, on one device."""

    def __init__(self, device: str, threads: int) -> None:
        del threads  # XLA takes as many as the process may run on
        self.device = device
        jax.config.update("jax_default_matmul_precision", "highest")
        # A program that an earlier run compiled would make compilation look short.
        jax.config.update("jax_enable_compilation_cache", False)

    def place(self, array: np.ndarray) -> np.ndarray:
        """Return the array unchanged: builders take NumPy arrays, and `load` places them."""
        return array

    def load(
        self, program: Program, inputs: list[np.ndarray], cotangent: np.ndarray | None
    ) -> None:
        self.cache = program.cache
        self.leaves = tuple(jnp.array(a) for a in (*inputs, *program.weights.values()))
        self.cotangent = None if cotangent is None else jnp.array(cotangent)
        step = with_gradients(program.call)
        self.jitted: dict[str, Any] = {FORWARD: jax.jit(program.call), BACKWARD: jax.jit(step)}
        self.jitted |= dict.fromkeys(CACHED, jax.jit(program.call, donate_argnums=0))

    def let_go(self) -> None:
        """Free what was loaded."""
        for name in ("cache", "leaves", "cotangent", "jitted"):
            vars(self).pop(name, None)

    def _arguments(self, mode: str, cotangent: jax.Array | None = None) -> tuple[Any, ...]:
        if mode == FORWARD:
            return self.leaves
        if mode in CACHED:
            return self.cache, *self.leaves
        return (self.cotangent if cotangent is None else cotangent, *self.leaves)

    def _started(self, mode: str, cotangent: jax.Array | None = None) -> Any:
        """Start a call, keep its cache for the next one, and return its unfinished result."""
        result = self.jitted[mode](*self._arguments(mode, cotangent))
        if mode in CACHED:
            result, self.cache = result
        return result

    def compile(self, mode: str) -> tuple[float | None, int | None]:
        """Trace and compile ahead of time; later calls reuse the program.

        Returns the seconds, and the bytes of temporaries or None if XLA does not report them.
        """
        started = time.perf_counter()
        compiled = self.jitted[mode].lower(*self._arguments(mode)).compile()
        seconds = time.perf_counter() - started
        analysis = compiled.memory_analysis()
        return seconds, None if analysis is None else int(analysis.temp_size_in_bytes)

    def call(self, mode: str, cotangent: jax.Array | None = None) -> Any:
        """Return the finished output; with gradients, also those of inputs and weights."""
        return jax.block_until_ready(self._started(mode, cotangent))

    def turn(self, mode: str, seconds: float) -> tuple[float, float]:
        """Time a turn of `seconds`; return as `timed_turn` does."""
        return timed_turn(lambda: self._started(mode), jax.block_until_ready, seconds)

    def tensors(
        self, mode: str, cotangent: np.ndarray | None
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the output, and the gradients of inputs and then weights, as NumPy arrays."""
        if cotangent is None:
            return np.asarray(self.call(mode)), []
        output, gradients = self.call(mode, jnp.array(cotangent))
        return np.asarray(output), list(map(np.asarray, gradients))

    def available(self) -> int:
        stats = None if self.device == "cpu" else jax.devices()[0].memory_stats()
        return stats["bytes_limit"] - stats["bytes_in_use"] if stats else memory.available()

    def peak(self, mode: str) -> int | None:
        """Return the most bytes that a call holds beyond those held before it.

        On an accelerator this is the allocator's peak of the whole process, which includes
        compilation and any earlier, larger call.
        """
        device = jax.devices()[0]
        if self.device == "cpu":
            return memory.peak_during(lambda: self.call(mode))
        before = device.memory_stats()["bytes_in_use"]
        self.call(mode)
        return device.memory_stats()["peak_bytes_in_use"] - before
