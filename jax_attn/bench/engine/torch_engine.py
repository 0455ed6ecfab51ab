"""Run a torch `Program`: compile it, time it, measure its memory, and return its tensors."""

import time
from typing import Any

import numpy as np
import torch

from jax_attn.bench.engine import memory
from jax_attn.bench.engine.turn import timed_turn
from jax_attn.bench.programs.program import Program
from jax_attn.bench.workload import BACKWARD
from jax_attn.transfer import as_numpy
from jax_attn.transfer.arrays import as_torch


class Engine:
    """One program at a time, in evaluation mode, on one device."""

    def __init__(self, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")
        # A program that an earlier run compiled would make compilation look short.
        torch._inductor.config.force_disable_caches = True
        self.device = {"cpu": "cpu", "gpu": "cuda"}[device]

    def place(self, array: np.ndarray) -> torch.Tensor:
        return as_torch(array.copy()).to(self.device)

    def load(
        self, program: Program, inputs: list[torch.Tensor], cotangent: torch.Tensor | None
    ) -> None:
        self.program, self.inputs, self.cotangent = program, inputs, cotangent
        self.tracked = [x.detach().clone().requires_grad_() for x in inputs]

    def let_go(self) -> None:
        """Free what was loaded."""
        for name in ("program", "inputs", "tracked", "cotangent"):
            vars(self).pop(name, None)

    def compile(self, mode: str) -> tuple[float | None, int | None]:
        """Compile by a first call, if torch compiles the program; return (seconds or None, None).

        The second is None because torch does not report the bytes of temporaries.
        """
        if not self.program.compiled:
            return None, None
        started = time.perf_counter()
        self.call(mode)
        return time.perf_counter() - started, None

    def call(self, mode: str, cotangent: torch.Tensor | None = None) -> Any:
        """Return the finished output; with gradients, also those of inputs and weights."""
        with torch.inference_mode(mode != BACKWARD):
            result = self._run(mode, self.cotangent if cotangent is None else cotangent)
            self._finish(result)
        return result

    def turn(self, mode: str, seconds: float) -> tuple[float, float]:
        """Time a turn of `seconds`; return as `timed_turn` does."""
        with torch.inference_mode(mode != BACKWARD):
            return timed_turn(lambda: self._run(mode, self.cotangent), self._finish, seconds)

    def _run(self, mode: str, cotangent: torch.Tensor | None) -> Any:
        if mode != BACKWARD:
            return self.program.call(*self.inputs)
        output = self.program.call(*self.tracked)
        leaves = [*self.tracked, *self.program.weights.values()]
        return output, torch.autograd.grad(output, leaves, cotangent)

    def _finish(self, _: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def tensors(
        self, mode: str, cotangent: np.ndarray | None
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the output, and the gradients of inputs and then weights, as NumPy arrays."""
        if cotangent is None:
            return as_numpy(self.call(mode)), []
        output, gradients = self.call(mode, self.place(cotangent))
        return as_numpy(output), list(map(as_numpy, gradients))

    def available(self) -> int:
        return memory.available() if self.device == "cpu" else torch.cuda.mem_get_info()[0]

    def peak(self, mode: str) -> int | None:
        """Return the most bytes that a call holds beyond those held before it."""
        if self.device == "cpu":
            return memory.peak_during(lambda: self.call(mode))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.call(mode)
        return torch.cuda.max_memory_allocated() - before
