"""The port of a pair in JAX, jitted in every mode. `torch_pair` says what is computed."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_attn.bench.pair.pair import DECAY, RATE, TimedPair
from jax_attn.bench.programs.operations import (
    OPTIMIZER,
    Operations,
    jax_operations,
    scope,
    scoped,
)
from jax_attn.bench.programs.program import TimedCall
from jax_attn.bench.workload import BACKWARD, CACHE, DECODE, FORWARD, PREFILL, STEP


def jitted(pair: TimedPair, device: str) -> "JaxPair":
    return JaxPair(pair)


def donated(pair: TimedPair, device: str) -> "JaxPair":
    return JaxPair(pair, donate_argnums=(0, 1))


class JaxPair:
    """The port, a function of its parameters. of_step: options of `jax.jit` for training steps."""

    compiled = True

    def __init__(self, pair: TimedPair, **of_step: Any) -> None:
        split: Any = nnx.split(pair.port, nnx.Param, nnx.Not(nnx.Param))
        graph, params, rest = split
        # A donated array is lost, but these belong to the caller.
        params = jax.tree.map(jnp.copy, params)
        rest = jax.tree.map(lambda x: jnp.array(x) if isinstance(x, np.ndarray) else x, rest)
        self.pair, self.names_modules = pair, False

        @contextlib.contextmanager
        def merged(params: Any, rest: Any) -> Iterator[Any]:
            port = nnx.merge(graph, params, rest)
            with scoped(port) if self.names_modules else contextlib.nullcontext():
                yield port

        def forward(params: Any, rest: Any, inputs: Any) -> Any:
            args, kwargs = pair.with_arrays(inputs)
            with merged(params, rest) as port:
                outputs = pair.call_port(port, *args, **kwargs)
            return outputs, nnx.state(port, nnx.Not(nnx.Param))

        def loss(params: Any, rest: Any, inputs: Any) -> Any:
            outputs, after = forward(params, rest, inputs)
            floats = [x for x in jax.tree.leaves(outputs) if jnp.issubdtype(x.dtype, jnp.floating)]
            return sum(jnp.square(x.astype(jnp.float32)).mean() for x in floats), after

        tx = optax.adamw(RATE, weight_decay=DECAY)

        def step(params: Any, optimizer: Any, rest: Any, inputs: Any) -> Any:
            grads, after = jax.grad(loss, has_aux=True)(params, rest, inputs)
            with scope(OPTIMIZER):
                updates, optimizer = tx.update(grads, optimizer, params)
                return optax.apply_updates(params, updates), optimizer, after

        self.state = {"params": params, "rest": rest, "optimizer": tx.init(params)}
        takes = "params", "rest", "inputs"
        self.calls = {
            FORWARD: TimedCall(jax.jit(forward), takes),
            BACKWARD: TimedCall(jax.jit(jax.grad(loss, has_aux=True)), takes),
            STEP: TimedCall(
                jax.jit(step, **of_step),
                ("params", "optimizer", "rest", "inputs"),
                ("params", "optimizer", ""),
            ),
        }
        if pair.cached:
            _, of_port = pair.cached

            def prefill(params: Any, rest: Any, inputs: Any) -> Any:
                with merged(params, rest) as port:
                    return of_port.prefill(port, **inputs)

            def decode(params: Any, rest: Any, cache: Any, inputs: Any) -> Any:
                one = {name: a[:, :1] for name, a in inputs.items()}
                with merged(params, rest) as port:
                    return of_port.step(port, cache, **one)

            self.calls[PREFILL] = TimedCall(jax.jit(prefill), takes)
            # The cache is donated in every way, as it is in practice when decoding.
            donating = jax.jit(decode, donate_argnums=2)
            self.calls[DECODE] = TimedCall(
                donating, ("params", "rest", CACHE, "inputs"), ("", CACHE)
            )

    def at(self, length: int) -> tuple[dict[str, TimedCall], dict[str, Any]]:
        """Return the calls by mode, and their state with the inputs of this length."""
        inputs = self.pair.at(length).named_inputs
        self.state["inputs"] = {name: jnp.array(a) for name, a in inputs.items()}
        self.state.pop(CACHE, None)
        return self.calls, self.state

    def operations(self, mode: str, call: Callable[[], Any]) -> Operations:
        """Return where a call spends its time. Traces it again, with the names of the modules."""
        jax.clear_caches()
        self.names_modules = True
        try:
            program = self.calls[mode].lowered(self.state).compile().as_text()
            call()
            return jax_operations(program, call)
        finally:
            self.names_modules = False
