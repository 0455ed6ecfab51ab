"""Helpers for the mesh of devices in which a call is traced."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

Tree = TypeVar("Tree")
MeshAxes = tuple[str, ...]
"""Mesh axes along which one axis of an array is sharded; empty if each device has all of it."""


def within_shard_map() -> bool:
    """Return whether the call runs inside a shard_map, on one device's part."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def checks_vma() -> bool:
    """Return whether the call is inside a shard_map with check_vma=True."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return bool(axes) and bool(jax.typeof(lax.axis_index(axes[0])).manual_axis_type.varying)


def explicit_mesh(tree: Any) -> AbstractMesh | None:
    """Return the mesh with Explicit axes of any array of the pytree, or None."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree))
    return next((m for m in meshes if AxisType.Explicit in m.axis_types), None)


def problems(mesh: AbstractMesh) -> list[str]:
    """Say why attention cannot be sharded by this mesh, or not while another one is set."""
    reasons, here = [], jax.sharding.get_abstract_mesh()
    if {AxisType.Auto, AxisType.Explicit} <= {*mesh.axis_types}:
        reasons.append(f"mesh: expected axes that are all Explicit, or all Auto, got {mesh}")
    if here.axis_names and here != mesh:
        reasons.append(f"mesh: expected arrays on the mesh that is set, {here}, got {mesh}")
    return reasons


def in_auto_mesh(tree: Any) -> bool:
    """Return whether the program is for several devices and XLA shards it automatically.

    The type of a placed array names its mesh. But if a mesh is set, the types of traced arrays name
    none, and JAX compiles for that mesh.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree)]
    meshes.append(jax.sharding.get_abstract_mesh())
    return any(mesh.size > 1 and AxisType.Auto in mesh.axis_types for mesh in meshes)


def cuts(x: jax.Array) -> list[MeshAxes]:
    """Return, for each axis of an array in an Explicit mesh, the mesh axes that shard it."""
    return [_names(entry) for entry in jax.typeof(x).sharding.spec]


def _names(entry: Any) -> MeshAxes:
    """Return the mesh axes that one entry of a PartitionSpec names."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def spec(axes: list[MeshAxes]) -> PartitionSpec:
    """Return the PartitionSpec of an array whose axes are sharded by these mesh axes."""
    return PartitionSpec(*(each or None for each in axes))


def whole(x: jax.Array, axis: int) -> jax.Array:
    """Return x with this axis gathered, if Explicit axes of a mesh shard it."""
    if (mesh := explicit_mesh(x)) is None:
        return x
    axes = cuts(x)
    axes[axis] = ()
    return placed(x, mesh, spec(axes))


def placed(x: jax.Array, mesh: AbstractMesh, at: PartitionSpec) -> jax.Array:
    """Return x with the sharding `at`; x itself if it has it already."""
    if jax.typeof(x).sharding.spec == at:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, at))


def kept(x: jax.Array, at: PartitionSpec) -> jax.Array:
    """Constrain x to the sharding `at` if the current mesh has its axes and only Auto axes."""
    mesh = jax.sharding.get_abstract_mesh()
    names = {name for entry in at for name in _names(entry)}
    if {*mesh.axis_types} != {AxisType.Auto} or not names <= {*mesh.axis_names}:
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, at))


def zeros(shape: Sequence[int], dtype: Any, at: PartitionSpec) -> jax.Array:
    """Return zeros, sharded as `at` says in the current mesh, if there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not any(at):
        return jnp.zeros(shape, dtype)
    lie = NamedSharding(mesh, at)
    if AxisType.Explicit in mesh.axis_types:
        return jnp.zeros(shape, dtype, out_sharding=lie)
    # Compiled, so that no device allocates the whole array.
    return jax.jit(lambda: lax.with_sharding_constraint(jnp.zeros(shape, dtype), lie))()


def misfits(
    where: str, at: PartitionSpec, shape: Sequence[int], mesh: Mapping[str, int]
) -> Iterator[str]:
    """Say why a mesh with axes of these sizes cannot shard an array of this shape as `at` says.

    where: the beginning of each reason.
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


def varying(tree: Tree, like: object) -> Tree:
    """Return the tree's floats, varying along every mesh axis along which any array in `like` does.

    A loop's carry must vary so from the start; then the gradients of an array that is equal on all
    devices are summed over the devices. Adding a zero computed from `like` works in every version
    of JAX. Outside a shard_map the tree is returned unchanged.
    """
    if not within_shard_map():
        return tree

    def data(x: jax.Array) -> jax.Array:
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    arrays = map(jnp.asarray, jax.tree.leaves(like))
    zeros = [(x != x).ravel()[0].astype(jnp.int32) * 0 for x in map(data, arrays)]
    zero = functools.reduce(jnp.add, zeros)

    def cast(x: jax.Array) -> jax.Array:
        return x + zero.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)
