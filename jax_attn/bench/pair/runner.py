"""Servers in the processes of a pair's run: one way to run the pair, or the judge of both sides."""

import tempfile
import time
from functools import partial
from typing import Any

import jax
import torch
from flax import nnx

from jax_attn.bench.engine import memory
from jax_attn.bench.engine.judge import errors
from jax_attn.bench.engine.runner import timed_round
from jax_attn.bench.engine.turn import timed_turn
from jax_attn.bench.pair.made import made, of_user
from jax_attn.bench.pair.operations import Operations
from jax_attn.bench.pair.pair import Pair, digests
from jax_attn.bench.pair.runs import RUNS, described
from jax_attn.bench.pair.ways import EAGER, WAYS
from jax_attn.bench.workload import CACHED, DECODE, FORWARD, PairError
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.call_side import RaisedError


class PairRunner:
    """One way to run the pair; call `load` first, then `place`."""

    def __init__(
        self, named: str | Pair, lengths: tuple[int, ...], way: str, device: str, threads: int
    ) -> None:
        self.named, self.lengths, self.way = named, lengths, WAYS[way]
        self.device, self.threads = device, threads
        self.length: int | None = None

    def load(self) -> dict[str, str]:
        """Make the pair, and return its digests."""
        pair = made(self.named, self.lengths)
        by_name = digests(pair)
        runs = RUNS[self.way.framework]
        self.runs: Any = runs(pair, self.way, self.device, self.threads)
        return by_name

    def place(self, length: int) -> None:
        """Take the inputs of this length, unless they are already in place."""
        if length != self.length:
            self.runs.place(length)
            self.length = length

    def compile(self, mode: str) -> tuple[float | None, int | None]:
        """Compile; return the seconds and the bytes of temporaries, each None if unknown."""
        self.runs.prepare(mode)
        self._before, started = self.runs.compiled(), time.perf_counter()
        temporaries = self.runs.compile(mode)
        seconds = time.perf_counter() - started
        return seconds if self.way.is_compiled else None, temporaries

    def programs(self) -> int | None:
        """Return how many programs were compiled since the last `compile`; None if never any."""
        return self.runs.compiled() - self._before if self.way.is_compiled else None

    def operations(self, mode: str) -> Operations:
        """Return where a call spends its time."""
        self.runs.prepare(mode)
        return self.runs.operations(mode)

    def warm_compile(self, mode: str) -> float | None:
        """Return the seconds to compile again with the compiler's cache on disk.

        Discards the compiled programs, so it must be the last request.
        """
        if not self.way.is_compiled:
            return None
        with tempfile.TemporaryDirectory(prefix="jax-attn-bench-") as folder:
            self.runs.prepare(mode)
            self.runs.keep(folder)
            self.runs.forget()
            self.runs.compile(mode)
            self.runs.forget()
            started = time.perf_counter()
            self.runs.compile(mode)
            return time.perf_counter() - started

    def first_call(self, mode: str) -> float:
        """Return the seconds of the first call after compiling."""
        self.runs.prepare(mode)
        started = time.perf_counter()
        self._call(mode)
        return time.perf_counter() - started

    def peak(self, mode: str) -> int | None:
        """Return the most bytes resident during a call beyond those before it; None on a GPU."""
        self.runs.prepare(mode)
        return memory.peak_during(lambda: self._call(mode)) if self.device == "cpu" else None

    def turn(self, mode: str) -> tuple[float, float]:
        """Time a round; return as `timed_round` does."""
        self.runs.prepare(mode)
        return timed_round(
            lambda seconds: timed_turn(lambda: self.runs.start(mode), self.runs.finish, seconds)
        )

    def _call(self, mode: str) -> Any:
        result = self.runs.start(mode)
        self.runs.finish(result)
        return result


class PairJudge:
    """Judge of the pair, in a process of its own; it also counts operations and bytes."""

    def __init__(self, named: str | Pair, lengths: tuple[int, ...], threads: int) -> None:
        self.named, self.lengths, self.threads = named, lengths, threads

    def load(self) -> dict[str, str]:
        self.pair = made(self.named, self.lengths)
        return digests(self.pair)

    def judge(self, length: int) -> dict[str, Any]:
        """Judge the pair under jit at this length; return fields of a measurement.

        A pair with a check of its own is judged once, on the inputs of that check.
        """
        pair = self.pair
        try:
            result = pair.check() if pair.check else _checked(pair.at(length), _dtype(pair))
        except (RaisedError, TypeError, ValueError) as error:
            raise PairError(f"{error}\n{of_user(error)}") from error
        return {
            "verdict": str(result.verdict),
            "reason": "; ".join(map(str, result.reasons)),
            **errors(result.tensors),
        }

    def about(self) -> dict[str, Any]:
        """Describe the pair: inputs by length, dtype, modes, and how many lengths are judged."""
        pair = self.pair
        return {
            "inputs": {length: described(pair.at(length)) for length in pair.lengths},
            "dtype": _dtype(pair),
            "modes": pair.modes,
            "usual_modes": pair.usual_modes,
            "checks": 1 if pair.check else len(pair.lengths),
        }

    def flops(self, length: int, modes: tuple[str, ...]) -> dict[str, int]:
        """Count the operations of the reference's products and convolutions in a call, by mode."""
        runs = RUNS["torch"](self.pair, WAYS[EAGER], "cpu", self.threads)
        runs.place(length)
        return {mode: runs.flops(mode) for mode in modes}

    def reads(self, length: int, modes: tuple[str, ...]) -> dict[str, int]:
        """Return the bytes of the parameters by mode; decode adds those of the cache.

        Parameters of embeddings are left out, because a call reads only one row for each token.
        """
        pair = self.pair.at(length)
        parts = (m for m in pair.reference.modules() if not isinstance(m, torch.nn.Embedding))
        read = {p for part in parts for p in part.parameters(recurse=False)}
        parameters = sum(p.numel() * p.element_size() for p in read)
        by_mode = {mode: parameters for mode in modes if mode in (FORWARD, *CACHED)}
        if pair.cached and DECODE in by_mode:
            _, of_port = pair.cached
            _, cache = nnx.eval_shape(partial(of_port.prefill, **pair.named_inputs), pair.port)
            by_mode[DECODE] += sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
        return by_mode


def _checked(pair: Pair, dtype: str) -> Result:
    from jax_attn.parity.checking.check import check

    call_reference, call_port = pair.calls
    return check(
        pair.reference,
        pair.port,
        pair.inputs,
        layout=pair.layout,
        reference_call=call_reference,
        port_call=call_port,
        dtype=dtype,
        transforms=("jit",),
    )


def _dtype(pair: Pair) -> str:
    """Return the dtype of the reference's first floating-point parameter, or float32."""
    floats = (p.dtype for p in pair.reference.parameters() if p.is_floating_point())
    return str(next(floats, "torch.float32")).removeprefix("torch.")
