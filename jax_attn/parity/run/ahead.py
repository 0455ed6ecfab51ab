"""Programs of a port, compiled in a thread while the reference runs; XLA needs no Python lock.

The thread runs nothing of the user's: the port is traced by the caller. Op by op, it compiles the
backward pass, whose operations a trace knows, the last one first, since the run itself begins with
the first. Both compile into JAX's own caches, under keys that hold every setting, so that the run
compiles what the thread has not, or has under another setting.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from jax_attn.parity.run.inputs_and_runs import Arrays
from jax_attn.parity.run.port import (
    Arguments,
    Forward,
    Port,
    Tree,
    forward_and_gradients,
    full_precision,
    jitted,
    x64_is_on,
)
from jax_attn.parity.run.programs import Traced


@contextlib.contextmanager
def compiled_ahead(port: Port, cotangents: Arrays, transforms: Sequence[str]) -> Iterator[None]:
    """Compile meanwhile what the port's first runs under eager and jit need.

    Only on a CPU: the memory of an accelerator may hold one run and no other beside it.
    """
    pool = ThreadPoolExecutor(1)
    try:
        # What the port raises its run raises again, where it is told.
        with contextlib.suppress(Exception), full_precision() as (platform, _):
            if platform == "cpu" and port.placement is None:
                _submit(pool, port, cotangents, transforms)
        yield
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _submit(
    pool: ThreadPoolExecutor, port: Port, cotangents: Arrays, transforms: Sequence[str]
) -> None:
    forward, params, floats, others = port.bind()
    args = params, floats, others
    on_device = {name: jnp.array(a) for name, a in cotangents.items()}
    is_known = False
    if "jit" in transforms:
        traced = Traced(jitted(forward).lower(*args, on_device))
        is_known = traced.is_known
        port.compiled["jit"] = pool.submit(traced.compiled)
    if "eager" in transforms and on_device and not is_known:
        for run in _backward(forward, args, on_device):
            pool.submit(run)


def _backward(forward: Forward, args: Arguments, cotangents: Tree) -> Iterator[Callable[[], Any]]:
    """Each operation of the backward pass once, on zeros, the last one first."""
    x64, device = x64_is_on(), jax.config.jax_default_device  # type: ignore[attr-defined]

    def on_zeros(equation: jex.JaxprEqn) -> None:
        with jax.enable_x64(x64), jax.default_device(device), full_precision():
            given = [
                atom.val if isinstance(atom, jex.Literal) else _zeros(atom.aval)
                for atom in equation.invars
            ]
            with equation.ctx.manager:
                equation.primitive.bind(*given, **equation.params)

    jaxpr = jax.make_jaxpr(lambda *a: forward_and_gradients(forward, *a))(*args, cotangents).jaxpr
    needing = set(jaxpr.invars[-len(jax.tree.leaves(cotangents)) :])
    backward: dict[str, jex.JaxprEqn] = {}
    for equation in jaxpr.eqns:
        if needing.intersection(v for v in equation.invars if not isinstance(v, jex.Literal)):
            needing.update(equation.outvars)
            if _is_plain(equation):
                avals = [atom.aval for atom in equation.invars]
                backward[f"{equation.primitive} {equation.params} {avals}"] = equation
    return (partial(on_zeros, equation) for equation in reversed(backward.values()))


def _is_plain(equation: jex.JaxprEqn) -> bool:
    """Whether an operation ends on any numbers and does nothing beside its result."""
    inside = list(jex.jaxprs_in_params(equation.params))
    if equation.effects or "callback" in equation.primitive.name:
        return False
    is_jit = equation.primitive.name == "jit"
    return not inside or (is_jit and all(_is_plain(e) for jaxpr in inside for e in jaxpr.eqns))


def _zeros(aval: Any) -> jax.Array:
    return jax.device_put(np.zeros(aval.shape, aval.dtype))
