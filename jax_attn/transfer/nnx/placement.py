"""Where the arrays of a module lie, and NumPy arrays put there."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding

from jax_attn.transfer.problems import Problem
from jax_attn.transfer.table.rows import regex


def unplaceable(arrays: Mapping[str, Any]) -> list[Problem]:
    """The paths of arrays that cannot be replaced where they lie, and why."""
    problems = []
    for path, old in arrays.items():
        where: Any = getattr(old, "sharding", None)
        if _is_abstract(where) and where.mesh != jax.sharding.get_mesh().abstract_mesh:
            text = f"expected devices to lie on, got a sharding over an abstract mesh {where.mesh}"
            problems.append(Problem("unwritten", path, text, "load under jax.set_mesh(mesh)"))
        elif where is not None:
            try:
                where.shard_shape(old.shape)
            except ValueError as error:
                text = f"expected an array that its sharding divides: {error}"
                problems.append(Problem("unwritten", path, text))
    return problems


def by_pattern(
    patterns: Iterable[str], paths: Collection[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """(path -> the patterns that it matches, if any, in order; the patterns without a path)."""
    rules = {pattern: regex(pattern) for pattern in patterns}
    matching = {
        path: [name for name, rule in rules.items() if rule.fullmatch(path)] for path in paths
    }
    matched = {name for names in matching.values() for name in names}
    return {k: v for k, v in matching.items() if v}, [name for name in rules if name not in matched]


def bytes_per_device(arrays: Mapping[str, Any]) -> int | None:
    """How much of placeable arrays one device holds; None where all lie on a single one."""
    lie = [(old, getattr(old, "sharding", None)) for old in arrays.values()]
    if not any(where is not None and where.num_devices > 1 for _, where in lie):
        return None
    shapes = [
        (old, old.shape if where is None else where.shard_shape(old.shape)) for old, where in lie
    ]
    return sum(math.prod(shape) * np.dtype(old.dtype).itemsize for old, shape in shapes)


def place(array: np.ndarray, old: Any) -> jax.Array:
    """A JAX copy of `array` where `old` lies; an uncommitted one stays free to move.

    Each device receives its own part, straight out of `array` whatever its strides, so that
    nothing is copied twice.
    """
    where = _where(old)
    if where is None:
        return _copied(array, None)
    memory = where.memory_kind
    indices: Mapping[Any, Any] = where.addressable_devices_indices_map(array.shape)
    parts = [
        # The ellipsis keeps a scalar an array.
        _copied(array[*index, ...], SingleDeviceSharding(device, memory_kind=memory))
        for device, index in indices.items()
    ]
    return jax.make_array_from_single_device_arrays(array.shape, where, parts, dtype=array.dtype)


def _where(old: Any) -> Sharding | None:
    """Where an array lies, or an abstract one is to lie; None where nobody chose."""
    where: Any = getattr(old, "sharding", None) if getattr(old, "committed", True) else None
    if _is_abstract(where):
        return NamedSharding(jax.sharding.get_mesh(), where.spec)
    return where


def _is_abstract(where: Any) -> bool:
    return isinstance(getattr(where, "mesh", None), AbstractMesh)


def _copied(array: np.ndarray, where: Sharding | None) -> jax.Array:
    copy = jax.device_put(array, where).block_until_ready()
    # The CPU takes an aligned NumPy array as it is, and `may_alias=False` does not forbid it.
    on_cpu = {device.platform for device in copy.devices()} == {"cpu"}
    if on_cpu and copy.unsafe_buffer_pointer() == array.ctypes.data:
        return jax.device_put(np.array(array), where)
    return copy
