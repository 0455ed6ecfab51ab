"""A forward pass of a port, and its backward pass, under several JAX transforms."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jax_attn.parity.run.emulate import emulate
from jax_attn.parity.run.programs import call_compiled

Tree = dict[str, Any]
Arguments = tuple[nnx.State, Tree, Tree]
"""Parameters, floating inputs, other inputs."""
Outputs = tuple[Tree, dict[str, Tree]]
"""Floating outputs by name; and others: `decided`, the outputs that are not floating, if there are
any, and, if the call changes its module, `left` and `second` as in a `Run`."""
Forward = Callable[[nnx.State, Tree, Tree], Outputs]
"""A forward pass, called on `Arguments`."""
OutputsAndGradients = tuple[Outputs, tuple[nnx.State, Tree] | None]
"""Outputs, and the gradients of parameters and of floating inputs; None without cotangents."""


def forward_and_gradients(
    forward: Forward, params: nnx.State, floats: Tree, others: Tree, cotangents: Tree
) -> OutputsAndGradients:
    """Run one forward pass and, if there are cotangents, its backward pass."""
    if not cotangents:
        return forward(params, floats, others), None
    outputs, vjp, after = jax.vjp(lambda p, x: forward(p, x, others), params, floats, has_aux=True)
    return (outputs, after), vjp(cotangents)


def _eager(forward: Forward, args: Arguments, cotangents: Tree) -> OutputsAndGradients:
    """Run operation by operation; the outputs are of a call that is not differentiated."""
    outputs = forward(*args)
    return outputs, forward_and_gradients(forward, *args, cotangents)[1] if cotangents else None


def jitted(forward: Forward) -> jax.stages.Wrapped:
    """Jit a function of `Arguments` and cotangents; its outputs are of a call that is not
    differentiated."""

    def step(*args: Any) -> OutputsAndGradients:
        *called_with, cotangents = args
        grads = forward_and_gradients(forward, *args)[1] if cotangents else None
        return forward(*called_with), grads

    return jax.jit(step)


def _jit(forward: Forward, args: Arguments, cotangents: Tree) -> OutputsAndGradients:
    return call_compiled(jitted(forward), *args, cotangents)


def _grad(forward: Forward, args: Arguments, cotangents: Tree) -> OutputsAndGradients:
    """Run jitted `jax.grad` of the scalar sum(cotangent * output), as in a training step."""
    *differentiated, others = args

    def loss(
        params: nnx.State, floats: Tree, others: Tree, cotangents: Tree
    ) -> tuple[jax.Array, Outputs]:
        outputs, after = forward(params, floats, others)
        # Some outputs may be wider than others; they are not promoted by themselves in strict mode.
        dtype = max((c.dtype for c in cotangents.values()), key=lambda dtype: dtype.itemsize)
        terms = [(c * outputs[k]).sum().astype(dtype) for k, c in cotangents.items()]
        return sum(terms, start=jnp.zeros((), dtype)), (outputs, after)

    if not cotangents:
        return call_compiled(jax.jit(forward), *args), None
    step = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    grads, outputs = call_compiled(step, *differentiated, others, cotangents)
    return outputs, grads


def _vmap(forward: Forward, args: Arguments, cotangents: Tree) -> OutputsAndGradients:
    """Run jitted over an added leading axis of two lanes; the first lane holds other numbers."""
    params, *inputs = args

    def two(a: jax.Array) -> Any:
        both = np.stack([np.flip(np.asarray(a)), np.asarray(a)])
        lies = a.sharding
        if not isinstance(lies, NamedSharding):
            return both
        return jax.device_put(both, NamedSharding(lies.mesh, PartitionSpec(None, *lies.spec)))

    def lanes(tree: Tree) -> Tree:
        return jax.tree.map(two, tree)

    # The parameters are no constants of the program, which XLA would fold.
    def lane(*args: Any) -> OutputsAndGradients:
        return forward_and_gradients(forward, *args)

    def second(a: jax.Array) -> Any:  # sliced by NumPy where it can be: it compiles nothing
        return (a if isinstance(a.sharding, NamedSharding) else np.asarray(a))[1]

    step = jax.jit(jax.vmap(lane, in_axes=(None, 0, 0, 0)))
    mapped = call_compiled(step, params, *map(lanes, (*inputs, cotangents)))
    return jax.tree.map(second, mapped)


def _remat(forward: Forward, args: Arguments, cotangents: Tree) -> OutputsAndGradients:
    """Run jitted, with activations recomputed in the backward pass (`jax.checkpoint`)."""
    step = jax.jit(lambda *args: forward_and_gradients(jax.checkpoint(forward), *args))
    return call_compiled(step, *args, cotangents)


def _emulated(forward: Forward, args: Arguments, cotangents: Tree) -> OutputsAndGradients:
    """Run jitted on the host, with products rounded as by the TPU's matrix unit."""
    step = emulate(lambda *args: forward_and_gradients(forward, *args), "mxu")
    return call_compiled(jax.jit(step), *args, cotangents)


RUN_UNDER: dict[str, Callable[[Forward, Arguments, Tree], OutputsAndGradients]] = {
    "eager": _eager,
    "jit": _jit,
    "grad": _grad,
    "vmap": _vmap,
    "remat": _remat,
    "emulated": _emulated,
}
"""Transform -> function that runs a forward pass under it: `TRANSFORMS`, and the emulated unit."""
