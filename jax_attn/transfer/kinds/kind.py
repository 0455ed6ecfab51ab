"""Define what a port that is no NNX module offers, and read and rebuild trees by path."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Arrays = Mapping[str, Any]
"""Dotted path -> array."""
Call = Callable[..., Any]
"""(the user's own object, *args, **inputs) -> outputs: a `port_call`."""


class Kind(ABC):
    """A port of one kind. It is never changed, except that a Keras model is loaded in place."""

    @abstractmethod
    def leaves(self) -> dict[str, nnx.Variable]:
        """Return every array by dotted path: parameters as nnx.Param, state as its nnx type."""

    @abstractmethod
    def rebuilt(self, arrays: Arrays) -> Any:
        """Return what the user handed in, with these arrays at the paths of `leaves`."""

    @abstractmethod
    def run(
        self, arrays: Arrays, call: Call | None, args: tuple[Any, ...], inputs: Mapping[str, Any]
    ) -> tuple[Any, Arrays]:
        """Call the port with these arrays; pure. Return its outputs, and its state afterwards.

        call: None calls the port as its framework does.
        """

    def modules(self) -> Iterator[tuple[str, Any]]:
        """Yield the layers by dotted path, if the kind has any: `infer` reads their types."""
        return iter(())


def call_itself(port: Any, *args: Any, **inputs: Any) -> Any:
    """Call a port that is called directly."""
    return port(*args, **inputs)


def is_array(leaf: Any) -> bool:
    """Return whether a leaf of a tree is an array, or stands for one."""
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def dotted(path: tuple[Any, ...]) -> str:
    """Return a path in a tree with dots between its keys, such as "layers.0.attn.weight"."""
    keys = (getattr(k, "name", getattr(k, "key", getattr(k, "idx", k))) for k in path)
    return ".".join(map(str, keys))


def arrays_of(tree: Any) -> dict[str, Any]:
    """Return the arrays of a tree by dotted path; those of a lone array are named "parameters".

    Raises ValueError if two arrays have one path, such as {"a": {"b": x}, "a.b": y}.
    """
    arrays: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = dotted(path) or "parameters"
        if is_array(leaf) and name in arrays:
            raise ValueError(f"port: two arrays of its tree have the path {name!r}")
        if is_array(leaf):
            arrays[name] = leaf
    return arrays


def with_arrays(tree: Any, arrays: Arrays) -> Any:
    """Return the tree with each array replaced by that at its dotted path."""

    def replaced(path: tuple[Any, ...], leaf: Any) -> Any:
        return arrays[dotted(path) or "parameters"] if is_array(leaf) else leaf

    return jax.tree_util.tree_map_with_path(replaced, tree)


def variable(array: Any, of_state: type[nnx.Variable] | None = None) -> nnx.Variable:
    """Return an array as an nnx.Param, or as state if it is of that type or not differentiable."""
    if of_state is not None:
        return of_state(array)
    return (nnx.Param if jnp.issubdtype(array.dtype, jnp.inexact) else nnx.Variable)(array)
