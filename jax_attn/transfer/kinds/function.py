"""A function and a tree of parameters as a port; a tree alone, which cannot be called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from flax import nnx

from jax_attn.transfer.kinds.kind import Arrays, Call, Kind, arrays_of, variable, with_arrays


@dataclass(frozen=True, eq=False)
class Function(Kind):
    """A port that is a pure function of its parameters. Made by `parity.function`.

    Attributes:
      apply: `(parameters, *args, **inputs) -> array | {name: array}`.
      parameters: a tree of arrays.
    """

    apply: Callable[..., Any]
    parameters: Any

    def leaves(self) -> dict[str, nnx.Variable]:
        return {path: variable(a) for path, a in arrays_of(self.parameters).items()}

    def rebuilt(self, arrays: Arrays) -> "Function":
        return Function(self.apply, with_arrays(self.parameters, arrays))

    def run(
        self, arrays: Arrays, call: Call | None, args: tuple[Any, ...], inputs: Mapping[str, Any]
    ) -> tuple[Any, Arrays]:
        port = partial(self.apply, with_arrays(self.parameters, arrays))
        return (call(port, *args, **inputs) if call else port(*args, **inputs)), {}


def function(apply: Callable[..., Any], parameters: Any) -> Function:
    """Make a port of a pure function and its parameters, for `check` and all that takes a port.

    Args:
      apply: `(parameters, *args, **inputs) -> array | {name: array}`. A `port_call` receives it
        with the parameters filled in: `lambda f, x: f(x, causal=True)`.
      parameters: any tree of arrays. Their paths in tables are those of the tree, with dots:
        `layers.0.attn.weight`. Leaves of other types are passed on as they are, and arrays that are
        not floating-point numbers have no gradient.

    Returns:
      The port. Its `parameters` are the tree, also after `transfer.load`.

    Raises:
      TypeError: `apply` is not callable, or the tree holds no array.
    """
    if not callable(apply):
        raise TypeError(f"apply: expected a function of parameters, got {type(apply).__name__}")
    if not arrays_of(parameters):
        kind = type(parameters).__name__
        raise TypeError(f"parameters: expected a tree that holds arrays, got {kind} without any")
    return Function(apply, parameters)


@dataclass(frozen=True, eq=False)
class Tree(Kind):
    """A tree of parameters without a function: it can be loaded and exported, not called."""

    tree: Any

    def leaves(self) -> dict[str, nnx.Variable]:
        return {path: variable(a) for path, a in arrays_of(self.tree).items()}

    def rebuilt(self, arrays: Arrays) -> Any:
        return with_arrays(self.tree, arrays)

    def run(
        self, arrays: Arrays, call: Call | None, args: tuple[Any, ...], inputs: Mapping[str, Any]
    ) -> tuple[Any, Arrays]:
        raise TypeError("port: a tree of parameters cannot be called; use parity.function")
