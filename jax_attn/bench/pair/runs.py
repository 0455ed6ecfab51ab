"""Both sides of a pair in every mode: forward, with gradients, and a training step.

The loss is the mean square of each output with floating-point numbers, added up. Its gradients are
those of the parameters. A step is AdamW's, and begins where the last one ended.
"""

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

from jax_attn.bench.pair.made import Pair
from jax_attn.bench.pair.ways import Way
from jax_attn.bench.workload import BACKWARD, FORWARD, STEP
from jax_attn.transfer.arrays import as_torch

RATE, DECAY = 1e-3, 1e-2


class TorchRuns:
    """The reference, on one device."""

    def __init__(self, pair: Pair, way: Way, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")
        # What an earlier run compiled would pass for a short compilation.
        torch._inductor.config.force_disable_caches = True
        self.device = {"cpu": "cpu", "gpu": "cuda"}[device]
        # Steps change the parameters, and those are the caller's.
        pair = pair._replace(reference=copy.deepcopy(pair.reference))
        self.module = pair.reference.to(self.device)
        arrays = {n: as_torch(a.copy()).to(self.device) for n, a in pair.named_inputs.items()}
        self.args, self.kwargs = pair.with_arrays(arrays)
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.parameters = parameters
        self.optimizer: Any = None
        if parameters:
            self.optimizer = torch.optim.AdamW(parameters, RATE, weight_decay=DECAY)
        runs = {FORWARD: self._forward, BACKWARD: self._backward, STEP: self._step}
        self.call: Callable[..., Any] = pair.call_reference
        if way.is_compiled:
            options: dict[str, Any] = way.options
            self.call = torch.compile(pair.call_reference, **options)
        self.is_compiled, self.runs = way.is_compiled, runs

    def start(self, mode: str) -> Any:
        """What a call gives, perhaps still under way."""
        with torch.inference_mode(mode == FORWARD):
            return self.runs[mode]()

    def finish(self, _: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def compile(self, mode: str) -> int | None:
        """Compiles, perhaps by a first call; the bytes of temporaries are not told."""
        if self.is_compiled:
            self.finish(self.start(mode))
        return None

    def flops(self, mode: str) -> int:
        """Of products and convolutions, forward and backward, as torch counts them."""
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            self.runs[BACKWARD if mode == STEP else mode]()
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


class JaxRuns:
    """The port, jitted, on one device."""

    def __init__(self, pair: Pair, way: Way, device: str, threads: int) -> None:
        del device, threads  # JAX takes those that the process may use
        jax.config.update("jax_default_matmul_precision", "highest")
        jax.config.update("jax_enable_compilation_cache", False)
        split: Any = nnx.split(pair.port, nnx.Param, nnx.Not(nnx.Param))
        graph, params, rest = split
        params = jax.tree.map(
            jnp.copy, params
        )  # a donated array is lost, and these are the caller's
        self.inputs = {name: jnp.array(a) for name, a in pair.named_inputs.items()}

        def forward(params: Any, rest: Any, inputs: Any) -> Any:
            port = nnx.merge(graph, params, rest)
            args, kwargs = pair.with_arrays(inputs)
            outputs = pair.call_port(port, *args, **kwargs)
            return outputs, nnx.state(port, nnx.Not(nnx.Param))

        def loss(params: Any, rest: Any, inputs: Any) -> Any:
            outputs, after = forward(params, rest, inputs)
            floats = [x for x in jax.tree.leaves(outputs) if jnp.issubdtype(x.dtype, jnp.floating)]
            return sum(jnp.square(x.astype(jnp.float32)).mean() for x in floats), after

        tx = optax.adamw(RATE, weight_decay=DECAY)

        def step(params: Any, state: Any, rest: Any, inputs: Any) -> Any:
            grads, after = jax.grad(loss, has_aux=True)(params, rest, inputs)
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

    def _arguments(self, mode: str) -> tuple[Any, ...]:
        if mode == STEP:
            return self.params, self.state, self.rest, self.inputs
        return self.params, self.rest, self.inputs

    def start(self, mode: str) -> Any:
        """What a call gives, perhaps still under way; a step's parameters are the next one's."""
        result = self.jitted[mode](*self._arguments(mode))
        if mode == STEP:
            self.params, self.state, _ = result
        return result

    def finish(self, result: Any) -> None:
        jax.block_until_ready(result)

    def compile(self, mode: str) -> int | None:
        """Traces and compiles; the compiler's bytes of temporaries."""
        compiled = self.jitted[mode].lower(*self._arguments(mode)).compile()
        analysis = compiled.memory_analysis()
        return None if analysis is None else int(analysis.temp_size_in_bytes)


def _tensors(outputs: Any) -> list[torch.Tensor]:
    """The tensors among the outputs, in order."""
    from torch.utils import _pytree

    return [x for x in _pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]


RUNS: dict[str, type] = {"torch": TorchRuns, "jax": JaxRuns}


def described(pair: Pair) -> str:
    """The names, dtypes and shapes of the inputs, in a line."""
    return ", ".join(
        f"{name} {np.dtype(a.dtype).name}{list(a.shape)}" for name, a in pair.named_inputs.items()
    )
