"""Meshes of devices as a call is traced: Explicit axes, and a shard_map's."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

MeshAxes = tuple[str, ...]
"""Axes of a mesh, by which one axis of an array is cut; none: it is whole on each device."""


def within_shard_map() -> bool:
    """Whether the call is one device's part of a larger one."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def checks_vma() -> bool:
    """Whether the call is inside a shard_map that checks along which axes results vary."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return bool(axes) and bool(jax.typeof(lax.axis_index(axes[0])).manual_axis_type.varying)


def explicit_mesh(tree: Any) -> AbstractMesh | None:
    """The mesh with Explicit axes that an array of the pytree lies on, if one does."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree))
    return next((m for m in meshes if AxisType.Explicit in m.axis_types), None)


def problems(mesh: AbstractMesh) -> list[str]:
    """Why attention cannot be cut by this mesh, or not while another one is set."""
    found, here = [], jax.sharding.get_abstract_mesh()
    if {AxisType.Auto, AxisType.Explicit} <= {*mesh.axis_types}:
        found.append(f"mesh: expected axes that are all Explicit, or all Auto, got {mesh}")
    if here.axis_names and here != mesh:
        found.append(f"mesh: expected arrays on the mesh that is set, {here}, got {mesh}")
    return found


def in_auto_mesh(tree: Any) -> bool:
    """Whether a program of the pytree's arrays is for several devices, and XLA cuts it by itself.

    The type of an array that was placed names its mesh. But where a mesh is set, types of what is
    traced name none, and JAX compiles for that mesh.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree)]
    meshes.append(jax.sharding.get_abstract_mesh())
    return any(mesh.size > 1 and AxisType.Auto in mesh.axis_types for mesh in meshes)


def cuts(x: jax.Array) -> list[MeshAxes]:
    """By which axes of its mesh each axis of an array in an Explicit one is cut."""
    return [_names(entry) for entry in jax.typeof(x).sharding.spec]


def _names(entry: Any) -> MeshAxes:
    """The axes of a mesh that one entry of a PartitionSpec names."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


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


def kept(x: jax.Array, at: PartitionSpec) -> jax.Array:
    """x, which XLA is to cut so, where the mesh that is set has Auto axes, these among them."""
    mesh = jax.sharding.get_abstract_mesh()
    names = {name for entry in at for name in _names(entry)}
    if {*mesh.axis_types} != {AxisType.Auto} or not names <= {*mesh.axis_names}:
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, at))


def zeros(shape: Sequence[int], dtype: Any, at: PartitionSpec) -> jax.Array:
    """Zeros, cut as `at` says by the mesh that is set, if one is."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not any(at):
        return jnp.zeros(shape, dtype)
    lie = NamedSharding(mesh, at)
    if AxisType.Explicit in mesh.axis_types:
        return jnp.zeros(shape, dtype, out_sharding=lie)
    # Compiled, so that no device makes the whole.
    return jax.jit(lambda: lax.with_sharding_constraint(jnp.zeros(shape, dtype), lie))()


def misfits(
    where: str, at: PartitionSpec, shape: Sequence[int], mesh: Mapping[str, int]
) -> Iterator[str]:
    """Why a mesh of axes of these sizes cannot cut an array of this shape so.

    where: how each reason begins.
    """
    if len(at) > len(shape):
        yield f"{where}: expected at most {len(shape)} axes, got {at}"
        return
    taken: list[str] = []
    for size, entry in zip(shape, at, strict=False):
        if entry is PartitionSpec.UNCONSTRAINED:
            yield f"{where}: expected axes of the mesh or None, got UNCONSTRAINED"
            continue
        names = _names(entry)
        taken += names
        if unknown := [name for name in names if name not in mesh]:
            yield f"{where}: expected axes of the mesh {tuple(mesh)}, got {unknown}"
        elif size % (parts := math.prod(mesh[name] for name in names)):
            yield f"{where}: expected parts whose number divides {size}, got {parts} by {entry!r}"
    if twice := sorted({name for name in taken if taken.count(name) > 1}):
        yield f"{where}: expected each axis of the mesh once, got {twice} more often"
