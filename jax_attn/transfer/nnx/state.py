"""The parameters of an NNX module, flattened by dotted paths."""

from collections.abc import Iterator
from typing import Any

from flax import nnx

from jax_attn.transfer.arrays import Spec, describe
from jax_attn.transfer.problems import Problem


def flatten(module: nnx.Pytree | nnx.State) -> dict[str, Any]:
    """The arrays of every nnx.Param, by dotted path: "layers.0.q_proj.kernel".

    module: an nnx.Module, or an nnx.State such as nnx.state or nnx.grad returns. The arrays
    are those the module holds, JAX or NumPy, not copies. An array shared by two parts of a
    module has one path, as in its state. Raises ValueError for two parameters that spell their
    path alike.
    """
    arrays: dict[str, Any] = {}
    for path, variable in variables(module):
        dotted = spelled(path)
        if dotted in arrays:
            raise ValueError(f"module: two parameters spell their path {dotted!r}")
        arrays[dotted] = variable.get_value() if isinstance(variable, nnx.Variable) else variable
    return arrays


def variables(module: nnx.Pytree | nnx.State) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Path and variable of every nnx.Param; of a pure state, path and array."""
    if not isinstance(module, nnx.Pytree | nnx.State):
        kind = type(module).__name__
        raise TypeError(f"module: expected an nnx.Module or an nnx.State, got {kind}")
    state = module if isinstance(module, nnx.State) else nnx.state(module, nnx.Param)
    for path, leaf in nnx.to_flat_state(state):
        if isinstance(leaf, nnx.Param) or not isinstance(leaf, nnx.Variable):
            yield path, leaf


def spelled(path: tuple[Any, ...]) -> str:
    """The path with dots between its parts."""
    return ".".join(map(str, path))


def described(arrays: dict[str, Any]) -> tuple[dict[str, Spec], list[Problem]]:
    """Shapes and dtypes by path, and a problem for each nnx.Param that holds no array."""
    paths, problems = {}, []
    for path, array in arrays.items():
        if hasattr(array, "shape") and hasattr(array, "dtype"):
            paths[path] = describe(array)
        else:
            text = f"expected the nnx.Param to hold an array, got {type(array).__name__}"
            problems.append(Problem("unreadable", path, text))
    return paths, problems
