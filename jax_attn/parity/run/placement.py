"""The placement of a port on a mesh of devices, and checks that replicas agree."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_attn.attention import meshes
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.transfer import flatten
from jax_attn.transfer.nnx.placement import by_pattern
from jax_attn.transfer.nnx.variables import spelled

Specs = Mapping[str, PartitionSpec]
"""The name of an input, or a pattern of parameters' dotted paths → its PartitionSpec."""


@dataclass(frozen=True)
class MeshPlacement:
    """A mesh, and the PartitionSpec of each input and parameter that is not replicated on it.

    The keys are names of inputs and dotted paths of parameters.
    """

    mesh: Mesh
    inputs: Specs
    parameters: Specs

    @classmethod
    def of(cls, mesh: Any, specs: Any, module: nnx.Module, inputs: Inputs) -> Self | None:
        """Build a placement from the mesh and specs of `check`; return None without a mesh.

        Raises ValueError with every reason why they do not fit.
        """
        if mesh is None and specs is None:
            return None
        specs = {} if specs is None else specs
        if problems := [*_mesh_problems(mesh)]:
            raise ValueError("\n".join(problems))
        shapes = {k: a.shape for k, a in inputs.by_name.items()}
        of_inputs = {name: spec for name, spec in specs.items() if name in shapes}
        patterns = [name for name in specs if name not in shapes]
        paths = {path: a.shape for path, a in flatten(module).items()}
        two = [name for name in of_inputs if name in paths]
        chosen, idle = by_pattern(patterns, paths)
        known = f"the name of an input ({', '.join(shapes)}) or a pattern that a parameter matches"
        example = f", such as {next(iter(paths))!r}" if paths else ""
        problems = [f"specs[{name!r}]: expected {known}{example}" for name in idle]
        problems += [f"specs[{name!r}]: it names an input and a parameter" for name in two]
        for name, spec in of_inputs.items():
            where = f"specs[{name!r}]: input {name} of shape {shapes[name]}"
            problems += meshes.misfits(where, spec, shapes[name], mesh.shape)
        for path, matching in chosen.items():
            if len({specs[name] for name in matching}) > 1:
                both = ", ".join(f"{name!r}: {specs[name]}" for name in matching)
                problems.append(f"specs: expected one for parameter {path}, got {both}")
            where = f"specs[{matching[0]!r}]: parameter {path} of shape {paths[path]}"
            problems += meshes.misfits(where, specs[matching[0]], paths[path], mesh.shape)
        if problems:
            raise ValueError("\n".join(problems))
        return cls(mesh, of_inputs, {path: specs[names[0]] for path, names in chosen.items()})

    @property
    def on_one_device(self) -> "MeshPlacement":
        """The same placement on one device: every axis of the mesh has size 1."""
        sizes = (1,) * len(self.mesh.axis_names)
        first = list(self.mesh.devices.flat)[:1]
        one = jax.make_mesh(sizes, self.mesh.axis_names, self.mesh.axis_types, devices=first)
        return replace(self, mesh=one)

    @property
    def words(self) -> str:
        """The mesh in words, as `in_words` gives it."""
        return in_words(self.mesh)

    def put_input(self, name: str, array: Any) -> jax.Array:
        """Return an input, placed on the mesh."""
        return self._put(array, self.inputs.get(name, PartitionSpec()))

    def put_state(self, state: nnx.State) -> nnx.State:
        """Return Variables placed on the mesh; one without a spec keeps its place on the mesh."""

        def put(path: str, array: Any) -> jax.Array:
            spec = self.parameters.get(path)
            lies = getattr(array, "sharding", None)
            if spec is None and isinstance(lies, NamedSharding) and lies.mesh == self.mesh:
                return array
            return self._put(array, spec or PartitionSpec())

        placed = []
        for path, leaf in nnx.to_flat_state(state):
            value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
            value = jax.tree.map(partial(put, spelled(path)), value)
            placed.append((path, leaf.replace(value) if isinstance(leaf, nnx.Variable) else value))
        return nnx.from_flat_state(placed)

    def _put(self, array: Any, spec: PartitionSpec) -> jax.Array:
        return jax.device_put(array, NamedSharding(self.mesh, spec))


def in_words(mesh: Mesh | AbstractMesh) -> str:
    """Return a mesh in words, such as "data=2, heads=4 (Explicit)"."""
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    kinds = dict.fromkeys(kind.name for kind in mesh.axis_types)
    return f"{sizes} ({', '.join(kinds)})"


def unlike_copies(*named: Mapping[str, Any]) -> list[str]:
    """Return the names of arrays whose replicas of one shard differ in bits between devices."""
    return [name for arrays in named for name, a in arrays.items() if not _copies_are_alike(a)]


def _copies_are_alike(array: Any) -> bool:
    if not isinstance(array, jax.Array) or jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return True
    first: dict[Any, bytes] = {}
    for shard in array.addressable_shards:
        place = tuple((at.start, at.stop) for at in shard.index)
        bits = np.asarray(shard.data).tobytes()
        if first.setdefault(place, bits) != bits:
            return False
    return True


def type_problems(mesh: Any, specs: Any) -> Iterator[str]:
    """Yield why these are not a mesh and specs."""
    if mesh is not None and not isinstance(mesh, Mesh):
        yield f"mesh: expected a jax.sharding.Mesh, got {type(mesh).__name__}"
    if specs is not None and mesh is None:
        yield "specs: expected a mesh as well, got mesh=None"
    if specs is not None and not isinstance(specs, Mapping):
        yield f"specs: expected a dict of PartitionSpecs, got {type(specs).__name__}"
        return
    for name, spec in (specs or {}).items():
        if not isinstance(name, str):
            yield f"specs: expected names, got {name!r}"
        if not isinstance(spec, PartitionSpec):
            yield f"specs[{name!r}]: expected a PartitionSpec, got {type(spec).__name__} {spec!r}"


def _mesh_problems(mesh: Mesh) -> Iterator[str]:
    if len({*mesh.axis_types}) > 1 or AxisType.Manual in mesh.axis_types:
        yield f"mesh: expected axes that are all Explicit, or all Auto, got {mesh.axis_types}"
    if mesh.is_multi_process:
        yield "mesh: expected devices of this process alone"
    default = next(iter(jax.numpy.zeros(()).devices())).platform
    if (got := mesh.devices.flat[0].platform) != default:
        yield f"mesh: expected devices of JAX's default platform, {default}, got {got}"
