"""Run functions of torch on one device."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from jax_attn.bench.engine import memory
from jax_attn.bench.programs.program import TimedProgram
from jax_attn.bench.workload import BACKWARD, CACHED, FORWARD, STEP
from jax_attn.transfer.arrays import as_torch


class TorchEngine:
    """The functions of one program at a time, and their state, on one device."""

    def __init__(self, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")
        # A program that an earlier run compiled would make compilation look short.
        torch._inductor.config.force_disable_caches = True
        self.device = {"cpu": "cpu", "gpu": "cuda"}[device]
        self.let_go()

    def place(self, array: np.ndarray) -> torch.Tensor:
        return as_torch(array.copy()).to(self.device)

    put = place

    def load(
        self, program: TimedProgram, inputs: list[torch.Tensor], cotangent: torch.Tensor | None
    ) -> None:
        """Take an implementation of a workload."""
        tracked = [x.detach().clone().requires_grad_() for x in inputs]
        state = {"cotangent": cotangent}

        def forward() -> Any:
            return program.call(*inputs)

        def backward() -> Any:
            output = program.call(*tracked)
            leaves = [*tracked, *program.weights.values()]
            return output, torch.autograd.grad(output, leaves, state["cotangent"])

        modes = (FORWARD, *CACHED)
        self.take(dict.fromkeys(modes, forward) | {BACKWARD: backward}, state, program.compiled)

    def take(
        self, calls: Mapping[str, Callable[[], Any]], state: dict[str, Any], compiled: bool
    ) -> None:
        """Take functions by mode. compiled: whether torch compiles them."""
        self.calls, self.state, self.is_compiled = calls, state, compiled

    def let_go(self) -> None:
        """Free what was loaded."""
        self.take({}, {}, compiled=False)

    def within(self, mode: str) -> contextlib.AbstractContextManager[None]:
        """Return the context of calls: without gradients in modes that need none."""
        return torch.inference_mode(mode not in (BACKWARD, STEP))

    def start(self, mode: str) -> Any:
        """Start a call and return its result, which may be unfinished."""
        return self.calls[mode]()

    def finish(self, _: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def compile(self, mode: str) -> tuple[float | None, int | None]:
        """Compile by a first call, if torch compiles the program; return (seconds or None, None).

        The second is None because torch does not report the bytes of temporaries.
        """
        if not self.is_compiled:
            return None, None
        started = time.perf_counter()
        with self.within(mode):
            self.finish(self.start(mode))
        return time.perf_counter() - started, None

    def compiled(self) -> int:
        """Return the number of graphs that this process has compiled so far."""
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def keep(self, folder: str) -> None:
        """Keep programs that are compiled from now on in this folder."""
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        torch._inductor.config.force_disable_caches = False

    def forget(self) -> None:
        """Discard compiled programs, so that the next call compiles again."""
        torch._dynamo.reset()

    def available(self) -> int:
        return memory.available() if self.device == "cpu" else torch.cuda.mem_get_info()[0]

    def peak_on_device(self, call: Callable[[], Any]) -> int:
        """Return the most bytes that a call holds beyond those held before it."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
