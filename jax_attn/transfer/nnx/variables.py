"""The arrays of a port's weights by dotted path, whatever its kind."""

from typing import Any

from flax import nnx

from jax_attn.transfer.kinds.held import PORTS, HeldPort, kind_of_weights, why_no_port
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.rows import regex

Weights = Any
"""An nnx.Module, a port of another kind, an nnx.State, or a mapping that is a tree of arrays."""


def flatten(module: Weights) -> dict[str, Any]:
    """Return the arrays of every parameter, by dotted path such as "layers.0.q_proj.kernel".

    Args:
      module: an nnx.Module; an nnx.State as returned by `nnx.state` or `nnx.grad`; a port of
        another kind, as `parity.check` takes them; or a tree of arrays, a mapping.

    Returns:
      A dict of the arrays that the module holds, JAX or NumPy, not copied. An array that two parts
      of an NNX module share has one path, as in its state.

    Raises:
      ValueError: two parameters have the same dotted path.
    """
    return values_of(variables(state_of(module)))


def carried(module: Weights, layout: Layout) -> dict[str, Any]:
    """Return `flatten`, and the arrays of every other Variable that a row of `layout` names.

    For example, a row may name an nnx.BatchStat: `row("bn.running_mean", "bn.mean")`. Variables
    without a row are not carried, whereas every parameter must be.
    """
    return values_of(variables(state_of(module), layout))


def state_of(module: Weights) -> nnx.Pytree | nnx.State:
    """Return an nnx.Module or nnx.State as it is, and weights of another kind as an nnx.Module.

    Raises TypeError if these are no weights.
    """
    if isinstance(module, nnx.Pytree | nnx.State):
        return module
    kind = kind_of_weights(module)
    if kind is None:
        why = why_no_port(module).removeprefix(f"expected {PORTS}")
        raise TypeError(f"module: expected {PORTS}, an nnx.State or a tree of arrays{why}")
    return HeldPort(kind)


Variables = dict[str, tuple[tuple[Any, ...], Any]]
"""Dotted path -> path in the state, and the variable there; in a pure state, the array."""


def variables(module: nnx.Pytree | nnx.State, layout: Layout | None = None) -> Variables:
    """Return every nnx.Param, and the other variables that `layout` names."""
    named = [regex(pattern) for pattern in layout.flax_paths()] if layout else []
    state = module if isinstance(module, nnx.State) else nnx.state(module)
    found: Variables = {}
    for path, leaf in nnx.to_flat_state(state):
        dotted = spelled(path)
        if not isinstance(leaf, nnx.Variable):
            takes = state is module
        else:
            takes = isinstance(leaf, nnx.Param) or any(
                pattern.fullmatch(dotted) for pattern in named
            )
        if not takes:
            continue
        if dotted in found:
            raise ValueError(f"module: two parameters have the path {dotted!r}")
        found[dotted] = path, leaf
    return found


def values_of(found: Variables) -> dict[str, Any]:
    """Return the arrays of variables, by dotted path."""
    return {
        dotted: leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        for dotted, (_, leaf) in found.items()
    }


def spelled(path: tuple[Any, ...]) -> str:
    """Return the path with dots between its parts."""
    return ".".join(map(str, path))
