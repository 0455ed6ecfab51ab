"""The sharding of a model's parameters, recorded before any of them is read."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from jax_attn.transfer import Problem, TransferError, flatten
from jax_attn.transfer.nnx.placement import by_pattern

Where = Sharding | PartitionSpec
"""A PartitionSpec is one on the mesh that `jax.set_mesh` sets."""
OfParameter = Callable[[str, tuple[int, ...]], Where | None]
Placing = Where | Mapping[str, Where] | OfParameter | None
"""Sharding of parameters: one for all, one for each pattern of a dotted path as in tables, or a
function of dotted path and shape."""

_EXPECTED = 'a jax.sharding.Sharding, such as NamedSharding(mesh, PartitionSpec(None, "heads"))'


def refuse_other_kinds(sharding: Any) -> None:
    """Raise TransferError if a `sharding=` is of no kind that `Placing` names.

    A mapping's problems are told all at once.
    """
    problems = []
    if isinstance(sharding, Mapping):
        for name, where in sharding.items():
            if not isinstance(name, str):
                text = f"expected a pattern of dotted paths, got {name!r}"
                problems.append(Problem("refused", "sharding", text))
            elif reason := _no_sharding(where):
                problems.append(Problem("refused", f"sharding {name!r}", reason))
    elif not _is_function(sharding) and sharding is not None and (reason := _no_sharding(sharding)):
        text = f"{reason}; or a mapping from patterns to such, or a function (path, shape) -> such"
        problems.append(Problem("refused", "sharding", text))
    if problems:
        raise TransferError("models", problems)


def record(model: nnx.Module, sharding: Placing) -> None:
    """Record in an abstract model the sharding of each parameter.

    Raises TransferError with every parameter that its sharding cannot shard.
    """
    if sharding is None:
        return
    of_parameter = _function(sharding, flatten(model))
    placed, problems, wrong = [], [], {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        old = variable.get_value()
        dotted = ".".join(map(str, path))
        where = of_parameter(dotted, old.shape)
        if where is not None and (reason := _no_sharding(where)):
            wrong[dotted] = reason
            continue
        try:
            if isinstance(where, PartitionSpec):
                where = NamedSharding(jax.sharding.get_mesh(), where)
            new = jax.ShapeDtypeStruct(old.shape, old.dtype, sharding=where)
        except Exception as error:  # a sharding's own errors have several types
            text = f"expected a sharding for an array of shape {list(old.shape)}: {error}"
            problems.append(Problem("unwritten", dotted, text))
        else:
            placed.append((path, variable.replace(new)))
    if wrong:  # told once: what a function returns for one parameter, it mostly does for all
        dotted, reason = next(iter(wrong.items()))
        text = f"the function, for {len(wrong)} parameter(s) such as {dotted!r}: {reason}"
        problems.append(Problem("refused", "sharding", text))
    if problems:
        raise TransferError("models", problems)
    nnx.update(model, nnx.from_flat_state(placed))


def _is_function(sharding: Any) -> bool:
    """Return whether this may be a function; a mesh and a class can be called for other ends."""
    return callable(sharding) and not isinstance(sharding, type | Mesh | AbstractMesh)


def _no_sharding(where: Any) -> str | None:
    """Return why a value is no sharding, or None if it is one."""
    if isinstance(where, PartitionSpec) and jax.sharding.get_mesh().empty:
        return f"expected {_EXPECTED}, got {where!r} without a mesh: use jax.set_mesh(mesh)"
    if isinstance(where, Where):
        return None
    return f"expected {_EXPECTED}, got {where!r}"


def _function(
    sharding: Where | Mapping[str, Where] | OfParameter, paths: Collection[str]
) -> OfParameter:
    """Return a function to the sharding of a path: of the first pattern that it matches.

    Raises TransferError if a pattern matches no path.
    """
    if isinstance(sharding, Where):
        return lambda path, shape: sharding
    if not isinstance(sharding, Mapping):
        return sharding
    chosen, idle = by_pattern(sharding, paths)
    if idle:
        text = f"expected a pattern that a parameter's path matches, such as {next(iter(paths))!r}"
        problems = [Problem("missing", f"sharding {name!r}", text) for name in idle]
        raise TransferError("models", problems)
    return lambda path, shape: sharding[chosen[path][0]] if path in chosen else None
