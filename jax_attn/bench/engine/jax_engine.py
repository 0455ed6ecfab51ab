"""Run jitted functions of JAX on one device."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from jax_attn.bench.engine import memory
from jax_attn.bench.programs.program import TimedCall, TimedProgram
from jax_attn.bench.workload import BACKWARD, CACHE, CACHED, FORWARD


def with_gradients(call: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, Any]]:
    """Return a function (cotangent, *leaves) -> (output, gradients of the leaves)."""

    def step(cotangent: jax.Array, *leaves: jax.Array) -> tuple[jax.Array, Any]:
        output, vjp = jax.vjp(call, *leaves)
        return output, vjp(cotangent)

    return step


class JaxEngine:
    """The functions of one program at a time, and the arrays of their state, on one device."""

    is_compiled = True
    put = staticmethod(jnp.array)

    def __init__(self, device: str, threads: int) -> None:
        del threads  # XLA takes as many as the process may run on
        self.device = device
        jax.config.update("jax_default_matmul_precision", "highest")
        # A program that an earlier run compiled would make compilation look short.
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX decides on its cache when it first compiles
        self.let_go()

    def place(self, array: np.ndarray) -> np.ndarray:
        """Return the array unchanged: builders take NumPy arrays, and `load` places them."""
        return array

    def load(
        self, program: TimedProgram, inputs: list[np.ndarray], cotangent: np.ndarray | None
    ) -> None:
        """Take an implementation of a workload."""
        # One tuple, because looking up each array would count as a part of a short call.
        leaves = tuple(jnp.array(a) for a in (*inputs, *program.weights.values()))
        state = {"leaves": leaves, CACHE: program.cache}
        if cotangent is not None:
            state["cotangent"] = jnp.array(cotangent)

        def forward(leaves: Any) -> Any:
            return program.call(*leaves)

        def backward(cotangent: Any, leaves: Any) -> Any:
            return with_gradients(program.call)(cotangent, *leaves)

        def cached(cache: Any, leaves: Any) -> Any:
            return program.call(cache, *leaves)

        donating = TimedCall(jax.jit(cached, donate_argnums=0), (CACHE, "leaves"), ("", CACHE))
        calls = {
            FORWARD: TimedCall(jax.jit(forward), ("leaves",)),
            BACKWARD: TimedCall(jax.jit(backward), ("cotangent", "leaves")),
        }
        self.take(calls | dict.fromkeys(CACHED, donating), state)

    def take(
        self, calls: Mapping[str, TimedCall], state: dict[str, Any], compiled: bool = True
    ) -> None:
        """Take calls by mode, which JAX always compiles."""
        assert compiled
        self.calls, self.state = calls, state

    def let_go(self) -> None:
        """Free what was loaded."""
        self.take({}, {})

    def within(self, mode: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def start(self, mode: str) -> Any:
        """Start a call and return its result, which may be unfinished."""
        return self.calls[mode](self.state)

    def finish(self, result: Any) -> None:
        jax.block_until_ready(result)

    def compile(self, mode: str) -> tuple[float | None, int | None]:
        """Trace and compile ahead of time; later calls reuse the program.

        Returns the seconds, and the bytes of temporaries or None if XLA does not report them.
        """
        started = time.perf_counter()
        compiled = self.calls[mode].lowered(self.state).compile()
        seconds = time.perf_counter() - started
        analysis = compiled.memory_analysis()
        return seconds, None if analysis is None else int(analysis.temp_size_in_bytes)

    def compiled(self) -> int:
        """Return the number of programs that this process has compiled so far."""
        return _programs["jax"]

    def keep(self, folder: str) -> None:
        """Keep programs that are compiled from now on in this folder."""
        compilation_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        jax.config.update("jax_enable_compilation_cache", True)

    def forget(self) -> None:
        """Discard compiled programs, so that the next call compiles again."""
        jax.clear_caches()

    def available(self) -> int:
        stats = None if self.device == "cpu" else jax.devices()[0].memory_stats()
        return stats["bytes_limit"] - stats["bytes_in_use"] if stats else memory.available()

    def peak_on_device(self, call: Callable[[], Any]) -> int:
        """Return the allocator's peak beyond the bytes held before a call.

        The peak is that of the whole process, with compilation and any earlier, larger call.
        """
        device = jax.devices()[0]
        before = device.memory_stats()["bytes_in_use"]
        call()
        return device.memory_stats()["peak_bytes_in_use"] - before


_programs: Counter[str] = Counter()


def _note_compilation(event: str, duration_secs: float, **_: str | int) -> None:
    del duration_secs
    _programs["jax"] += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_note_compilation)
