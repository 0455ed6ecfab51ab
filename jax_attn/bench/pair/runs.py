"""Run both sides of a pair in every mode: forward, with gradients, and a training step.

The loss is the mean square of each floating-point output, added up; gradients are taken with
respect to the parameters. A training step is AdamW's and continues from the last one. If the pair
has a cache, prefill reads a prompt into an empty cache, and decode reads one token after it; every
call repeats the same one.
"""

import contextlib
import copy
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from jax_attn.bench.pair.operations import (
    OPTIMIZER,
    Operations,
    jax_operations,
    scope,
    scoped,
    torch_operations,
)
from jax_attn.bench.pair.pair import Cached, Pair
from jax_attn.bench.pair.ways import Way
from jax_attn.bench.workload import BACKWARD, CACHED, DECODE, FORWARD, PREFILL, STEP
from jax_attn.parity.run.torch_settings import plain_kernels
from jax_attn.transfer.arrays import as_torch

RATE, DECAY = 1e-3, 1e-2
T = TypeVar("T")


class TorchRuns:
    """The reference, on one device."""

    def __init__(self, pair: Pair, way: Way, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")
        # A program that an earlier run compiled would make compilation look short.
        torch._inductor.config.force_disable_caches = True
        self.device = {"cpu": "cpu", "gpu": "cuda"}[device]
        # Steps change the parameters, but these belong to the caller.
        self.pair = pair = pair._replace(reference=copy.deepcopy(pair.reference))
        self.module = pair.reference.to(self.device)
        self.place(pair.lengths[0])
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.parameters = parameters
        self.optimizer: Any = None
        if parameters:
            self.optimizer = torch.optim.AdamW(parameters, RATE, weight_decay=DECAY)
        self.runs = {
            FORWARD: self._forward,
            BACKWARD: self._backward,
            STEP: self._step,
            PREFILL: self._prefill,
            DECODE: self._decode,
        }
        options: dict[str, Any] = way.options
        compiled: Any = partial(torch.compile, **options) if way.is_compiled else _as_it_is
        self.call: Callable[..., Any] = compiled(pair.call_reference)
        if pair.cached:
            self.cached = Cached(*map(compiled, pair.cached[0]))
        self.is_compiled = way.is_compiled

    def place(self, length: int) -> None:
        """Take the inputs of this length for the following calls."""
        inputs = self.pair.at(length).named_inputs
        self.arrays = {n: as_torch(a.copy()).to(self.device) for n, a in inputs.items()}
        self.args, self.kwargs = self.pair.with_arrays(self.arrays)
        self.cache: Any = None

    def prepare(self, mode: str) -> None:
        """Prepare what a call needs besides its program: decode needs the prompt in the cache."""
        if mode == DECODE and self.cache is None:
            with torch.inference_mode():
                _, self.cache = self._prefill()

    def start(self, mode: str) -> Any:
        """Start a call and return its result, which may be unfinished."""
        with torch.inference_mode(mode in (FORWARD, *CACHED)):
            return self.runs[mode]()

    def finish(self, _: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def compile(self, mode: str) -> int | None:
        """Compile by a first call, if this way compiles; torch does not report temporaries."""
        if self.is_compiled:
            self.finish(self.start(mode))
        return None

    def compiled(self) -> int:
        """Return the number of graphs that this process has compiled so far."""
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def operations(self, mode: str) -> Operations:
        """Return where a call spends its time; nothing if compiled, as its modules are unknown."""
        if self.is_compiled or self.device != "cpu":  # the profiler's own times are the host's
            return ()
        return torch_operations(self.module, lambda: self.start(mode))

    def keep(self, folder: str) -> None:
        """Keep programs that are compiled from now on in this folder."""
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        torch._inductor.config.force_disable_caches = False

    def forget(self) -> None:
        """Discard compiled programs, so that the next call compiles again."""
        torch._dynamo.reset()

    def flops(self, mode: str) -> int:
        """Count the operations of products and convolutions, forward and backward, as torch does.

        The counter does not see fused kernels, so the call runs with plain ones.
        """
        from torch.utils.flop_counter import FlopCounterMode

        counted = BACKWARD if mode == STEP else mode
        # In inference mode, the counter would not see the products of linear layers.
        self.prepare(mode)
        counter = FlopCounterMode(display=False)
        with torch.set_grad_enabled(counted == BACKWARD), plain_kernels(), counter:
            self.runs[counted]()
        return counter.get_total_flops()

    def _forward(self) -> Any:
        return self.call(*self.args, **self.kwargs)

    def _loss(self) -> torch.Tensor:
        outputs = [x for x in _tensors(self._forward()) if x.requires_grad]
        return torch.stack([x.float().square().mean() for x in outputs]).sum()

    def _backward(self) -> Any:
        return torch.autograd.grad(self._loss(), self.parameters, allow_unused=True)

    def _step(self) -> None:
        self.optimizer.zero_grad()
        self._loss().backward()
        self.optimizer.step()

    def _prefill(self) -> tuple[Any, Any]:
        return self.cached.prefill(self.module, **self.arrays)

    def _decode(self) -> Any:
        one = {name: a[:, :1] for name, a in self.arrays.items()}
        out, self.cache = self.cached.step(self.module, self.cache, **one)
        return out


class JaxRuns:
    """The port, jitted, on one device."""

    def __init__(self, pair: Pair, way: Way, device: str, threads: int) -> None:
        del device, threads  # JAX uses whatever the process may use
        jax.config.update("jax_default_matmul_precision", "highest")
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX decides on its cache when it first compiles
        split: Any = nnx.split(pair.port, nnx.Param, nnx.Not(nnx.Param))
        graph, params, rest = split
        # A donated array is lost, but these belong to the caller.
        params = jax.tree.map(jnp.copy, params)
        rest = jax.tree.map(lambda x: jnp.array(x) if isinstance(x, np.ndarray) else x, rest)
        self.pair, self.names_modules = pair, False
        self.place(pair.lengths[0])

        def forward(params: Any, rest: Any, inputs: Any) -> Any:
            port = nnx.merge(graph, params, rest)
            args, kwargs = pair.with_arrays(inputs)
            with self._scope(port):
                outputs = pair.call_port(port, *args, **kwargs)
            return outputs, nnx.state(port, nnx.Not(nnx.Param))

        def loss(params: Any, rest: Any, inputs: Any) -> Any:
            outputs, after = forward(params, rest, inputs)
            floats = [x for x in jax.tree.leaves(outputs) if jnp.issubdtype(x.dtype, jnp.floating)]
            return sum(jnp.square(x.astype(jnp.float32)).mean() for x in floats), after

        tx = optax.adamw(RATE, weight_decay=DECAY)

        def step(params: Any, state: Any, rest: Any, inputs: Any) -> Any:
            grads, after = jax.grad(loss, has_aux=True)(params, rest, inputs)
            with scope(OPTIMIZER):
                updates, state = tx.update(grads, state, params)
                return optax.apply_updates(params, updates), state, after

        self.params, self.rest = params, rest
        self.state = tx.init(params)
        donated: dict[str, Any] = {"donate_argnums": (0, 1)} if way.donates else {}
        self.jitted: dict[str, Any] = {
            FORWARD: jax.jit(forward),
            BACKWARD: jax.jit(jax.grad(loss, has_aux=True)),
            STEP: jax.jit(step, **donated),
        }
        if pair.cached:
            _, of_port = pair.cached

            def prefill(params: Any, rest: Any, inputs: Any) -> Any:
                port = nnx.merge(graph, params, rest)
                with self._scope(port):
                    return of_port.prefill(port, **inputs)

            def decode(params: Any, rest: Any, cache: Any, inputs: Any) -> Any:
                one = {name: a[:, :1] for name, a in inputs.items()}
                port = nnx.merge(graph, params, rest)
                with self._scope(port):
                    return of_port.step(port, cache, **one)

            # The cache is donated in every way, as it is in practice when decoding.
            self.jitted |= {PREFILL: jax.jit(prefill), DECODE: jax.jit(decode, donate_argnums=2)}

    def place(self, length: int) -> None:
        """Take the inputs of this length for the following calls."""
        inputs = self.pair.at(length).named_inputs
        self.inputs = {name: jnp.array(a) for name, a in inputs.items()}
        self.cache: Any = None

    def _scope(self, port: nnx.Module) -> contextlib.AbstractContextManager[None]:
        return scoped(port) if self.names_modules else contextlib.nullcontext()

    def _arguments(self, mode: str) -> tuple[Any, ...]:
        if mode == STEP:
            return self.params, self.state, self.rest, self.inputs
        if mode == DECODE:
            return self.params, self.rest, self.cache, self.inputs
        return self.params, self.rest, self.inputs

    def prepare(self, mode: str) -> None:
        """Prepare what a call needs besides its program: decode needs the prompt in the cache."""
        if mode == DECODE and self.cache is None:
            out = self.jitted[PREFILL](self.params, self.rest, self.inputs)
            _, self.cache = jax.block_until_ready(out)

    def start(self, mode: str) -> Any:
        """Start a call and return its result, which may be unfinished.

        The next call continues from the parameters, optimizer state or cache that this one returns.
        """
        result = self.jitted[mode](*self._arguments(mode))
        if mode == STEP:
            self.params, self.state, _ = result
        elif mode == DECODE:
            result, self.cache = result
        return result

    def finish(self, result: Any) -> None:
        jax.block_until_ready(result)

    def compile(self, mode: str) -> int | None:
        """Trace and compile; return the bytes of temporaries, or None if XLA reports none."""
        compiled = self.jitted[mode].lower(*self._arguments(mode)).compile()
        analysis = compiled.memory_analysis()
        return None if analysis is None else int(analysis.temp_size_in_bytes)

    def compiled(self) -> int:
        """Return the number of programs that this process has compiled so far."""
        return _programs["jax"]

    def operations(self, mode: str) -> Operations:
        """Return where a call spends its time. Traces it again, with the names of the modules."""
        self.forget()
        self.names_modules = True
        try:
            program = self.jitted[mode].lower(*self._arguments(mode)).compile().as_text()
            self.finish(self.start(mode))
            return jax_operations(program, lambda: self.finish(self.start(mode)))
        finally:
            self.names_modules = False

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


_programs: Counter[str] = Counter()


def _note_compilation(event: str, duration_secs: float, **_: str | int) -> None:
    del duration_secs
    _programs["jax"] += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_note_compilation)


def _as_it_is(x: T) -> T:
    return x


def _tensors(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors among the outputs, in order."""
    from torch.utils import _pytree

    return [x for x in _pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]


RUNS: dict[str, type] = {"torch": TorchRuns, "jax": JaxRuns}


def described(pair: Pair) -> str:
    """Return the names, dtypes and shapes of the inputs in one line."""
    return ", ".join(
        f"{name} {np.dtype(a.dtype).name}{list(a.shape)}" for name, a in pair.named_inputs.items()
    )
