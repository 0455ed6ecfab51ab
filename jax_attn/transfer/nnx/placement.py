"""Placement of NumPy arrays where the arrays of a module are."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding

from jax_attn.transfer.problems import Problem
from jax_attn.transfer.table.rows import regex


def unplaceable(arrays: Mapping[str, Any]) -> list[Problem]:
    """Report arrays that cannot be replaced on their devices."""
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
                shape = list(old.shape)
                text = f"expected an array of shape {shape} that its sharding divides: {error}"
                problems.append(Problem("unwritten", path, text))
    return problems


def by_pattern(
    patterns: Iterable[str], paths: Collection[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Map each path to the patterns that it matches, in order; also return unmatched patterns."""
    rules = {pattern: regex(pattern) for pattern in patterns}
    matching = {
        path: [name for name, rule in rules.items() if rule.fullmatch(path)] for path in paths
    }
    matched = {name for names in matching.values() for name in names}
    return {k: v for k, v in matching.items() if v}, [name for name in rules if name not in matched]


def bytes_per_device(arrays: Mapping[str, Any]) -> int | None:
    """Return how many bytes each device holds; None if all arrays are on one device."""
    lie = [(old, getattr(old, "sharding", None)) for old in arrays.values()]
    if not any(where is not None and where.num_devices > 1 for _, where in lie):
        return None
    shapes = [
        (old, old.shape if where is None else where.shard_shape(old.shape)) for old, where in lie
    ]
    return sum(math.prod(shape) * np.dtype(old.dtype).itemsize for old, shape in shapes)


def place(array: np.ndarray, old: Any) -> jax.Array:
    """Return a JAX copy of `array` on the devices of `old`, uncommitted if `old` is.

    Each device receives its own part, directly from `array` whatever its strides, so nothing is
    copied twice.
    """
    where = _where(old)
    if where is None:
        return _copied(array, None)
    memory = where.memory_kind
    indices: Mapping[Any, Any] = where.addressable_devices_indices_map(array.shape)
    parts = [
        # The ellipsis keeps a scalar as an array.
        _copied(array[*index, ...], SingleDeviceSharding(device, memory_kind=memory))
        for device, index in indices.items()
    ]
    return jax.make_array_from_single_device_arrays(array.shape, where, parts, dtype=array.dtype)


def _where(old: Any) -> Sharding | None:
    """Return an array's sharding, or an abstract array's intended one; None if not chosen."""
    where: Any = getattr(old, "sharding", None) if getattr(old, "committed", True) else None
    if _is_abstract(where):
        return NamedSharding(jax.sharding.get_mesh(), where.spec)
    return where


def _is_abstract(where: Any) -> bool:
    return isinstance(getattr(where, "mesh", None), AbstractMesh)


def _copied(array: np.ndarray, where: Sharding | None) -> jax.Array:
    copy = jax.device_put(array, where).block_until_ready()
    # The CPU backend aliases an aligned NumPy array, and `may_alias=False` does not prevent it.
    on_cpu = {device.platform for device in copy.devices()} == {"cpu"}
    if on_cpu and copy.unsafe_buffer_pointer() == array.ctypes.data:
        return jax.device_put(np.array(array), where)
    return copy
