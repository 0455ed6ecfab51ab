"""Run an NNX module: outputs and gradients, under each of JAX's transformations.

Every transform computes the same three things, outputs, gradients of the floating inputs
and of every `nnx.Param`, by another way through JAX: one table, `RUN_UNDER`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_attn.parity.run.inputs_and_runs import Inputs, Run, is_float, named_outputs
from jax_attn.transfer import flatten

Tree = dict[str, Any]


@dataclass(frozen=True)
class Port:
    """An NNX module with what it is called on. The module is split once and never changed."""

    module: nnx.Module
    call: Callable[..., Any] | None
    inputs: Inputs

    def bind(self) -> tuple[Callable[..., Tree], nnx.State, Tree, Tree]:
        """(forward, params, floats, others), so that forward(params, floats, others) is a call.

        floats and others are the inputs by name: those with a gradient and those without.
        """
        graph, params, rest = nnx.split(self.module, nnx.Param, ...)
        leaves = self.inputs.named(
            tuple(jnp.array(a) for a in self.inputs.args),
            {k: jnp.array(a) for k, a in self.inputs.kwargs.items()},
        )
        floats = {k: a for k, a in leaves.items() if jnp.issubdtype(a.dtype, jnp.floating)}
        others = {k: a for k, a in leaves.items() if k not in floats}

        def forward(params: nnx.State, floats: Tree, others: Tree) -> Tree:
            named = floats | others
            args = tuple(named.pop(str(i)) for i in range(len(self.inputs.args)))
            # A copy each time: what a call changes (random keys, counters) is dropped.
            module = nnx.merge(graph, params, rest, copy=True)
            result = self.call(module, *args, **named) if self.call else module(*args, **named)
            return named_outputs(result, jax.Array, "port")

        return forward, params, floats, others

    def run(self, dtype: str, cotangents: Mapping[str, np.ndarray], transform: str) -> Run:
        """Outputs in `dtype` and, where there are cotangents, every gradient.

        Raises TypeError where an output is not `dtype`.
        """
        forward, *args = self.bind()
        shapes = jax.eval_shape(forward, *args)
        wrong = {k: s.dtype.name for k, s in shapes.items() if s.dtype.name != dtype}
        if wrong:
            raise TypeError(
                f"port: expected outputs of dtype {dtype}, got {wrong}; build the module with "
                f"dtype and param_dtype {dtype}"
            )
        fits = {k: s.shape for k, s in shapes.items()} == {
            k: c.shape for k, c in cotangents.items()
        }
        # Outputs of other names or shapes have no cotangents: the comparison will say so.
        given = {k: jnp.array(a, dtype) for k, a in cotangents.items()} if fits else {}
        outputs, grads = RUN_UNDER[transform](forward, *args, given)
        if grads is None:
            return Run(_arrays(outputs), {}, {})
        param_grads, input_grads = grads
        return Run(_arrays(outputs), _arrays(input_grads), _arrays(flatten(param_grads)))


def _arrays(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(a) for name, a in arrays.items()}


def forward_and_gradients(forward, params, floats, others, cotangents):
    """(outputs, (parameter gradients, input gradients)); None without cotangents."""
    if not cotangents:
        return forward(params, floats, others), None
    outputs, vjp = jax.vjp(lambda p, x: forward(p, x, others), params, floats)
    return outputs, vjp(cotangents)


def _eager(forward, params, floats, others, cotangents):
    """Operation by operation; the outputs from a call outside any differentiation."""
    _, grads = forward_and_gradients(forward, params, floats, others, cotangents)
    return forward(params, floats, others), grads


def _jit(forward, params, floats, others, cotangents):
    """Compiled; the forward pass apart, as it runs where nothing is differentiated."""
    outputs = jax.jit(forward)(params, floats, others)
    if not cotangents:
        return outputs, None
    step = jax.jit(lambda *args: forward_and_gradients(forward, *args)[1])
    return outputs, step(params, floats, others, cotangents)


def _grad(forward, params, floats, others, cotangents):
    """`jax.grad` of the scalar sum(cotangent * output), compiled: as a training step has it."""

    def loss(params, floats):
        outputs = forward(params, floats, others)
        terms = [jnp.vdot(c, outputs[k], precision="highest") for k, c in cotangents.items()]
        return sum(terms, start=jnp.zeros((), terms[0].dtype)), outputs

    if not cotangents:
        return jax.jit(forward)(params, floats, others), None
    step = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    grads, outputs = step(params, floats)
    return outputs, grads


def _vmap(forward, params, floats, others, cotangents):
    """Compiled over an added leading axis, two lanes; the first lane holds other numbers."""

    def lanes(tree):
        return jax.tree.map(lambda a: np.stack([np.flip(a), a]), jax.device_get(tree))

    def one(floats, others, cotangents):
        return forward_and_gradients(forward, params, floats, others, cotangents)

    mapped = jax.jit(jax.vmap(one))(lanes(floats), lanes(others), lanes(cotangents))
    return jax.tree.map(lambda a: a[1], jax.device_get(mapped))


def _remat(forward, params, floats, others, cotangents):
    """Compiled, activations recomputed in the backward pass (`jax.checkpoint`)."""
    return jax.jit(lambda *args: forward_and_gradients(jax.checkpoint(forward), *args))(
        params, floats, others, cotangents
    )


def _emulated(forward, params, floats, others, cotangents):
    """As the TPU's matrix unit rounds: not a run on one."""
    from jax_attn.parity.run.emulate import emulate

    return jax.jit(emulate(lambda *args: forward_and_gradients(forward, *args), "mxu"))(
        params, floats, others, cotangents
    )


RUN_UNDER: dict[str, Callable[..., tuple[Tree, Any]]] = {
    "eager": _eager,
    "jit": _jit,
    "grad": _grad,
    "vmap": _vmap,
    "remat": _remat,
    "emulated": _emulated,
}


def parameters(module: nnx.Module) -> dict[str, np.ndarray]:
    """dotted path -> every `nnx.Param`, bit for bit."""
    return _arrays(flatten(module))


def float_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a name, bfloat16 among them."""
    dtype = np.dtype(getattr(jnp, name))
    assert is_float(dtype)
    return dtype
