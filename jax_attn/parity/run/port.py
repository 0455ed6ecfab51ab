"""Run an NNX module: outputs, gradients of the floating inputs and of every `nnx.Param`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_attn.parity.run.inputs_and_runs import Arrays, Inputs, Run, is_float, named_outputs
from jax_attn.parity.run.transforms import RUN_UNDER, Forward, Tree
from jax_attn.transfer import flatten


@dataclass(frozen=True)
class Port:
    """An NNX module with what it is called on. The module is split once and never changed."""

    module: nnx.Module
    call: Callable[..., Any] | None
    inputs: Inputs

    def bind(self) -> tuple[Forward, nnx.State, Tree, Tree]:
        """(forward, params, floats, others), so that forward(params, floats, others) is a call.

        floats and others are the inputs by name: those with a gradient and those without.
        """
        graph, params, *rest = nnx.split(self.module, nnx.Param, ...)
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
            module = nnx.merge(graph, params, *rest, copy=True)
            result = self.call(module, *args, **named) if self.call else module(*args, **named)
            return named_outputs(result, jax.Array, "port")

        return forward, params, floats, others

    def run(self, dtype: str, cotangents: Arrays, transform: str) -> Run:
        """Outputs in `dtype` and, where there are cotangents, every gradient.

        Raises TypeError where an output is not `dtype`.
        """
        forward, params, floats, others = self.bind()
        shapes = jax.eval_shape(forward, params, floats, others)
        mistyped = {k: s.dtype.name for k, s in shapes.items() if s.dtype.name != dtype}
        if mistyped:
            raise TypeError(
                f"port: expected outputs of dtype {dtype}, got {mistyped}; build the module with "
                f"dtype and param_dtype {dtype}"
            )
        fits = {k: s.shape for k, s in shapes.items()} == {
            k: c.shape for k, c in cotangents.items()
        }
        # Outputs of other names or shapes have no cotangents: the comparison will say so.
        fitting = {k: jnp.array(a, dtype) for k, a in cotangents.items()} if fits else {}
        outputs, grads = RUN_UNDER[transform](forward, (params, floats, others), fitting)
        if grads is None:
            return Run(_arrays(outputs), {}, {})
        param_grads, input_grads = grads
        return Run(_arrays(outputs), _arrays(input_grads), _arrays(flatten(param_grads)))


def _arrays(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(a) for name, a in arrays.items()}


def parameters(module: nnx.Module) -> dict[str, np.ndarray]:
    """dotted path -> every `nnx.Param`, bit for bit."""
    return _arrays(flatten(module))


def float_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a name, bfloat16 among them."""
    dtype = np.dtype(getattr(jnp, name))
    assert is_float(dtype)
    return dtype
