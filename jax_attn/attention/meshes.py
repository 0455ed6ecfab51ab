"""Meshes of devices as a call is traced: Explicit axes, and a shard_map's."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

MeshAxes = tuple[str, ...]
"""Axes of a mesh, by which one axis of an array is cut; none: it is whole on each device."""


def within_shard_map() -> bool:
    """Whether the call is one device's part of a larger one."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def explicit_mesh(tree: Any) -> AbstractMesh | None:
    """The mesh with Explicit axes that an array of the pytree lies on, if one does."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree))
    return next((m for m in meshes if AxisType.Explicit in m.axis_types), None)


def in_auto_mesh(x: jax.Array) -> bool:
    """Whether an array belongs to a program for several devices, which XLA cuts by itself."""
    mesh = jax.typeof(x).sharding.mesh
    return mesh.size > 1 and AxisType.Auto in mesh.axis_types


def cuts(x: jax.Array) -> list[MeshAxes]:
    """By which axes of its mesh each axis of an array in an Explicit one is cut."""
    entries = jax.typeof(x).sharding.spec
    return [(e,) if isinstance(e, str) else tuple(e or ()) for e in entries]


def spec(axes: list[MeshAxes]) -> PartitionSpec:
    """That of an array whose axes are cut by these."""
    return PartitionSpec(*(each or None for each in axes))


def whole(x: jax.Array, axis: int) -> jax.Array:
    """x with an axis that Explicit axes of a mesh cut gathered."""
    if (mesh := explicit_mesh(x)) is None:
        return x
    axes = cuts(x)
    axes[axis] = ()
    return placed(x, mesh, spec(axes))


def placed(x: jax.Array, mesh: AbstractMesh, at: PartitionSpec) -> jax.Array:
    """x as `at` cuts it: itself where it lies so already."""
    if jax.typeof(x).sharding.spec == at:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, at))
