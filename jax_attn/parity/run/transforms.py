"""The ways through JAX by which a port is run, all to the same outputs and gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_attn.parity.run.emulate import emulate

Tree = dict[str, Any]
Arguments = tuple[nnx.State, Tree, Tree]
"""Parameters, floating inputs, other inputs."""
Forward = Callable[[nnx.State, Tree, Tree], Tree]
"""Of `Arguments`, to outputs by name."""
OutputsAndGradients = tuple[Tree, tuple[nnx.State, Tree] | None]
"""Outputs, and the gradients of parameters and of floating inputs; None without cotangents."""


def forward_and_gradients(
    forward: Forward, params: nnx.State, floats: Tree, others: Tree, cotangents: Tree
) -> OutputsAndGradients:
    """One forward pass and, where there are cotangents, its backward pass."""
    if not cotangents:
        return forward(params, floats, others), None
    outputs, vjp = jax.vjp(lambda p, x: forward(p, x, others), params, floats)
    return outputs, vjp(cotangents)


def _eager(forward: Forward, args: Arguments, cotangents: Tree) -> OutputsAndGradients:
    """Operation by operation; the outputs from a call outside any differentiation."""
    _, grads = forward_and_gradients(forward, *args, cotangents)
    return forward(*args), grads


def _jit(forward: Forward, args: Arguments, cotangents: Tree) -> OutputsAndGradients:
    """Compiled; the forward pass apart, as it runs where nothing is differentiated."""
    outputs = jax.jit(forward)(*args)
    if not cotangents:
        return outputs, None
    step = jax.jit(lambda *args: forward_and_gradients(forward, *args)[1])
    return outputs, step(*args, cotangents)


def _grad(forward: Forward, args: Arguments, cotangents: Tree) -> OutputsAndGradients:
    """`jax.grad` of the scalar sum(cotangent * output), compiled: as a training step has it."""
    *differentiated, others = args

    def loss(params: nnx.State, floats: Tree) -> tuple[jax.Array, Tree]:
        outputs = forward(params, floats, others)
        terms = [jnp.vdot(c, outputs[k], precision="highest") for k, c in cotangents.items()]
        return sum(terms, start=jnp.zeros((), terms[0].dtype)), outputs

    if not cotangents:
        return jax.jit(forward)(*args), None
    step = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    grads, outputs = step(*differentiated)
    return outputs, grads


def _vmap(forward: Forward, args: Arguments, cotangents: Tree) -> OutputsAndGradients:
    """Compiled over an added leading axis, two lanes; the first lane holds other numbers."""
    params, *inputs = args

    def lanes(tree: Tree) -> Tree:
        return jax.tree.map(lambda a: np.stack([np.flip(a), a]), jax.device_get(tree))

    def one(floats: Tree, others: Tree, cotangents: Tree) -> OutputsAndGradients:
        return forward_and_gradients(forward, params, floats, others, cotangents)

    mapped = jax.jit(jax.vmap(one))(*map(lanes, (*inputs, cotangents)))
    return jax.tree.map(lambda a: a[1], jax.device_get(mapped))


def _remat(forward: Forward, args: Arguments, cotangents: Tree) -> OutputsAndGradients:
    """Compiled, activations recomputed in the backward pass (`jax.checkpoint`)."""
    step = jax.jit(lambda *args: forward_and_gradients(jax.checkpoint(forward), *args))
    return step(*args, cotangents)


def _emulated(forward: Forward, args: Arguments, cotangents: Tree) -> OutputsAndGradients:
    """As the TPU's matrix unit rounds: not a run on one."""
    step = emulate(lambda *args: forward_and_gradients(forward, *args), "mxu")
    return jax.jit(step)(*args, cotangents)


RUN_UNDER: dict[str, Callable[[Forward, Arguments, Tree], OutputsAndGradients]] = {
    "eager": _eager,
    "jit": _jit,
    "grad": _grad,
    "vmap": _vmap,
    "remat": _remat,
    "emulated": _emulated,
}
"""transform -> what runs a forward function under it; `TRANSFORMS` and the emulated matrix unit."""
