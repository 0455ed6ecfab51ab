"""What the processes of a pair's run serve: one way to run it, or the judge of both sides."""

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
    """One way to run the pair; `load` comes first, then `place`."""

    def __init__(
        self, named: str | Pair, lengths: tuple[int, ...], way: str, device: str, threads: int
    ) -> None:
        self.named, self.lengths, self.way = named, lengths, WAYS[way]
        self.device, self.threads = device, threads
        self.length: int | None = None

    def load(self) -> dict[str, str]:
        """Make the pair; the digests of what was made."""
        pair = made(self.named, self.lengths)
        found = digests(pair)
        runs = RUNS[self.way.framework]
        self.runs: Any = runs(pair, self.way, self.device, self.threads)
        return found

    def place(self, length: int) -> None:
        """Take the inputs of this length, unless it has them."""
        if length != self.length:
            self.runs.place(length)
            self.length = length

    def compile(self, mode: str) -> tuple[float | None, int | None]:
        """(seconds, bytes of the compiler's temporaries); None for what there is none of."""
        self.runs.prepare(mode)
        self._before, started = self.runs.compiled(), time.perf_counter()
        temporaries = self.runs.compile(mode)
        seconds = time.perf_counter() - started
        return seconds if self.way.is_compiled else None, temporaries

    def programs(self) -> int | None:
        """How many were compiled since `compile` was last asked for; None where none ever is."""
        return self.runs.compiled() - self._before if self.way.is_compiled else None

    def operations(self, mode: str) -> Operations:
        """Where the time of a call goes."""
        self.runs.prepare(mode)
        return self.runs.operations(mode)

    def warm_compile(self, mode: str) -> float | None:
        """Seconds to compile again, with what the compiler keeps on disk; forgets what it has.

        The last that is asked for.
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
        """Seconds of the first call after compiling."""
        self.runs.prepare(mode)
        started = time.perf_counter()
        self._call(mode)
        return time.perf_counter() - started

    def peak(self, mode: str) -> int | None:
        """The most bytes resident during a call beyond those before it; None on a GPU."""
        self.runs.prepare(mode)
        return memory.peak_during(lambda: self._call(mode)) if self.device == "cpu" else None

    def turn(self, mode: str) -> tuple[float, float]:
        """As `timed_round`."""
        self.runs.prepare(mode)
        return timed_round(
            lambda seconds: timed_turn(lambda: self.runs.start(mode), self.runs.finish, seconds)
        )

    def _call(self, mode: str) -> Any:
        result = self.runs.start(mode)
        self.runs.finish(result)
        return result


class PairJudge:
    """The verdict on the pair, in a process of its own, and how many operations it takes."""

    def __init__(self, named: str | Pair, lengths: tuple[int, ...], threads: int) -> None:
        self.named, self.lengths, self.threads = named, lengths, threads

    def load(self) -> dict[str, str]:
        self.pair = made(self.named, self.lengths)
        return digests(self.pair)

    def judge(self, length: int) -> dict[str, Any]:
        """The verdict under jit and the worst tensor at this length, as a measurement has them.

        A pair with a check of its own is judged once, on what that check takes.
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
        """What the pair is. inputs: by length. checks: how many of the lengths are judged apart."""
        pair = self.pair
        return {
            "inputs": {length: described(pair.at(length)) for length in pair.lengths},
            "dtype": _dtype(pair),
            "modes": pair.modes,
            "usual_modes": pair.usual_modes,
            "checks": 1 if pair.check else len(pair.lengths),
        }

    def flops(self, length: int, modes: tuple[str, ...]) -> dict[str, int]:
        """mode → operations of the reference's products and convolutions, in one call."""
        runs = RUNS["torch"](self.pair, WAYS[EAGER], "cpu", self.threads)
        runs.place(length)
        return {mode: runs.flops(mode) for mode in modes}

    def reads(self, length: int, modes: tuple[str, ...]) -> dict[str, int]:
        """mode → bytes of the parameters, and of the cache for a step.

        Of an embedding's parameters, a call reads a row for each token; they are left out.
        """
        pair = self.pair.at(length)
        parts = (m for m in pair.reference.modules() if not isinstance(m, torch.nn.Embedding))
        read = {p for part in parts for p in part.parameters(recurse=False)}
        parameters = sum(p.numel() * p.element_size() for p in read)
        found = {mode: parameters for mode in modes if mode in (FORWARD, *CACHED)}
        if pair.cached and DECODE in found:
            _, of_port = pair.cached
            _, cache = nnx.eval_shape(partial(of_port.prefill, **pair.named_inputs), pair.port)
            found[DECODE] += sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
        return found


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
    """Of the reference's first parameter with floating-point numbers; float32 of none."""
    floats = (p.dtype for p in pair.reference.parameters() if p.is_floating_point())
    return str(next(floats, "torch.float32")).removeprefix("torch.")
