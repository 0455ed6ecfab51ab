"""Compile a port's programs in a thread while the reference runs; XLA does not hold Python's lock.

The thread runs no user code: the caller traces the port. For the eager run, the thread compiles the
operations of the backward pass, which the trace lists, from the last to the first, because the run
itself begins with the first. Thread and run compile into JAX's own caches, whose keys hold every
setting, so the run compiles only what the thread has not compiled under the same settings.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from jax_attn.parity.run.inputs_and_runs import Arrays
from jax_attn.parity.run.port import Port, full_precision, x64_is_on
from jax_attn.parity.run.programs import LoweredProgram
from jax_attn.parity.run.transforms import (
    Arguments,
    Forward,
    Tree,
    forward_and_gradients,
    jitted,
)


@contextlib.contextmanager
def compiled_ahead(
    port: Port, dtype: str, cotangents: Arrays, transforms: Sequence[str]
) -> Iterator[None]:
    """Compile in the background what the port's first runs under eager and jit need.

    Does nothing except on a CPU: an accelerator's memory may hold only one run at a time.
    """
    pool = ThreadPoolExecutor(1)
    try:
        # If the port raises an error here, its run raises it again and reports it.
        with contextlib.suppress(Exception), full_precision() as (platform, _):
            if platform == "cpu" and port.placement is None:
                _submit(pool, port, dtype, cotangents, transforms)
        yield
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _submit(
    pool: ThreadPoolExecutor,
    port: Port,
    dtype: str,
    cotangents: Arrays,
    transforms: Sequence[str],
) -> None:
    forward, args, on_device = port.called(dtype, cotangents)
    is_known = False
    if "jit" in transforms:
        traced = LoweredProgram(jitted(forward).lower(*args, on_device))
        is_known = traced.is_known
        port.compiled["jit"] = pool.submit(traced.compiled)
    if "eager" in transforms and on_device and not is_known:
        for run in _backward(forward, args, on_device):
            pool.submit(run)


def _backward(forward: Forward, args: Arguments, cotangents: Tree) -> Iterator[Callable[[], Any]]:
    """Return calls that run each distinct operation of the backward pass on zeros, last first."""
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
    """Return whether an operation terminates on any numbers and has no side effects."""
    inside = list(jex.jaxprs_in_params(equation.params))
    if equation.effects or "callback" in equation.primitive.name:
        return False
    is_jit = equation.primitive.name == "jit"
    return not inside or (is_jit and all(_is_plain(e) for jaxpr in inside for e in jaxpr.eqns))


def _zeros(aval: Any) -> jax.Array:
    return jax.device_put(np.zeros(aval.shape, aval.dtype))
