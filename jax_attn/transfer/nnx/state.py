"""NNX state meets a table: `plan`, `load`, `export`. Imports jax and flax, so it is imported late.

Not called `load`: a module of that name would hide the function in the package.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding

from jax_attn.transfer.arrays import Spec, describe, read, specs
from jax_attn.transfer.problems import Problem, TransferError, listed
from jax_attn.transfer.table import resolve
from jax_attn.transfer.table.layout import Layout, untied
from jax_attn.transfer.table.plan_table import printed
from jax_attn.transfer.table.resolve import Move


@dataclass(frozen=True, repr=False)
class Plan:
    """What a load would do, row by row, and every reason why it would not. Prints as a table."""

    moves: list[Move]
    keys: dict[str, Spec]
    paths: dict[str, Spec]
    problems: list[Problem] = field(default_factory=list)
    passed_over: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        table = printed(self.moves, lambda move: self.paths[move.row.paths[0]].dtype)
        table = "\n".join(
            [table, *(f"{k}: passed over: {why}" for k, why in self.passed_over.items())]
        )
        if not self.problems:
            return table
        return "\n".join([table, "", f"{len(self.problems)} problem(s):", *listed(self.problems)])

    def __repr__(self) -> str:
        return f"<Plan: {len(self.moves)} rows, {len(self.problems)} problems>"


def flatten(module: Any) -> dict[str, Any]:
    """The arrays of every nnx.Param, by dotted path: "layers.0.q_proj.kernel".

    module: an nnx.Module, or an nnx.State such as nnx.state or nnx.grad returns. The arrays
    are those the module holds, JAX or NumPy, not copies. An array shared by two parts of a
    module has one path, as in its state.
    """
    arrays = {}
    for path, variable in _variables(module):
        dotted = ".".join(map(str, path))
        if dotted in arrays:
            raise ValueError(f"module: two parameters spell their path {dotted!r}")
        arrays[dotted] = variable.get_value() if isinstance(variable, nnx.Variable) else variable
    return arrays


def plan(module: Any, tensors: Mapping[str, Any], layout: Layout) -> Plan:
    """What `load` would do, without doing it.

    module: an nnx.Module; an abstract one (nnx.eval_shape) will do. tensors: torch key to
    NumPy, JAX or torch tensor; of a checkpoint nothing but the header is read. Returns a Plan
    that holds every problem; raises only TypeError, for arguments of the wrong kind.
    """
    _check_arguments(tensors, layout)
    paths, problems = _specs(module)
    keys, unreadable = specs(tensors)
    problems += unreadable
    held = {p.name for p in problems}
    passed_over = resolve.passed(layout.passed_over, keys)
    moves, found = resolve.for_loading(
        layout.groups,
        layout.refusals,
        {key: spec.shape for key, spec in keys.items() if key not in passed_over},
        {path: spec.shape for path, spec in paths.items()},
    )
    # A tensor that cannot be read is not missing.
    problems += [p for p in found if p.name not in held]
    for move in moves:
        problems += _wrong_dtypes(move, keys, paths)
    problems += _too_wide(paths)
    if not paths and not problems:
        problems.append(Problem("missing", "module", "expected at least one nnx.Param, got none"))
    return Plan(moves, keys, paths, problems, passed_over)


def load(module: Any, tensors: Mapping[str, Any], layout: Layout) -> Plan:
    """Write torch tensors into an NNX module through a table: every nnx.Param, or nothing.

    The arrays are copies of `tensors`, bit for bit, each with the sharding and device of the
    one it replaces; of a checkpoint one tensor is read at a time, and each device given its part.
    An abstract module (nnx.eval_shape) becomes a real one, and holds no old arrays meanwhile.
    Returns the plan that was carried out. Raises TransferError with every problem; the module is
    then as it was.
    """
    if isinstance(module, nnx.State):
        raise TypeError("module: expected an nnx.Module to write into, got an nnx.State")
    made = plan(module, tensors, layout)
    current = flatten(module)
    if problems := made.problems or untied(layout, tensors) + _homeless(current):
        raise TransferError("load, nothing written", problems)
    placed: dict[str, jax.Array] = {}
    for move in made.moves:
        placed |= _moved(move, tensors, current)
    fresh = [
        (path, variable.replace(placed[".".join(map(str, path))]))
        for path, variable in _variables(module)
    ]
    nnx.update(module, nnx.from_flat_state(fresh))
    return made


def export(module: Any, layout: Layout) -> dict[str, np.ndarray]:
    """Every nnx.Param of an NNX module as torch tensors, by torch key: the inverse of `load`.

    The arrays are copies, bit for bit; bfloat16 is ml_dtypes'. Raises TransferError.
    """
    check_layout(layout)
    _, problems = _specs(module)
    if problems:
        raise TransferError("export", problems)
    tensors = layout.to_torch(flatten(module))
    return {key: np.array(tensor, order="C") for key, tensor in tensors.items()}


def _variables(module: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Paths and variables of every nnx.Param; of a pure state, its arrays."""
    if not isinstance(module, nnx.Pytree | nnx.State):
        kind = type(module).__name__
        raise TypeError(f"module: expected an nnx.Module or an nnx.State, got {kind}")
    state = module if isinstance(module, nnx.State) else nnx.state(module, nnx.Param)
    return [
        (path, leaf)
        for path, leaf in nnx.to_flat_state(state)
        if isinstance(leaf, nnx.Param) or not isinstance(leaf, nnx.Variable)
    ]


def _specs(module: Any) -> tuple[dict[str, Spec], list[Problem]]:
    found, problems = {}, []
    for path, array in flatten(module).items():
        if hasattr(array, "shape") and hasattr(array, "dtype"):
            found[path] = describe(array)
        else:
            text = f"expected the nnx.Param to hold an array, got {type(array).__name__}"
            problems.append(Problem("unreadable", path, text))
    return found, problems


def _wrong_dtypes(move: Move, keys: dict[str, Spec], paths: dict[str, Spec]) -> list[Problem]:
    expected = {paths[path].dtype for path in move.row.paths}
    problems = []
    for key in move.row.keys:
        if {keys[key].dtype} != expected:
            targets = ", ".join(f"{path} ({paths[path].dtype})" for path in move.row.paths)
            hint = f"build the module with param_dtype={keys[key].dtype}, or cast the tensors"
            text = f"expected {' or '.join(sorted(expected))} for {targets}, got {keys[key].dtype}"
            problems.append(Problem("wrong dtype", key, text, hint))
    return problems


def _too_wide(paths: dict[str, Spec]) -> list[Problem]:
    """jax narrows what it does not hold, without a word."""
    problems = []
    for path, spec in paths.items():
        held = str(jax.dtypes.canonicalize_dtype(np.dtype(spec.dtype)))
        if held != spec.dtype:
            text = f"expected a dtype that jax holds here, got {spec.dtype}, narrowed to {held}"
            problems.append(Problem("wrong dtype", path, text, "enable x64 around the load"))
    return problems


def _moved(move: Move, tensors: Mapping[str, Any], current: dict[str, Any]) -> dict[str, jax.Array]:
    """One row carried out; what it read is let go before the next is read."""
    sources = tuple(read(tensors, key) for key in move.row.keys)
    arrays = move.row.to_flax(sources, move.path_shapes)
    return {
        path: place(array, current[path])
        for path, array in zip(move.row.paths, arrays, strict=True)
    }


def _homeless(current: Mapping[str, Any]) -> list[Problem]:
    """Arrays that are to lie on a mesh of which the devices are not known."""
    text = "expected devices to lie on, got a sharding over an abstract mesh"
    return [
        Problem("unwritten", path, f"{text} {old.sharding.mesh}", "load under jax.set_mesh(mesh)")
        for path, old in current.items()
        if _is_abstract(getattr(old, "sharding", None))
        and old.sharding.mesh != jax.sharding.get_mesh().abstract_mesh
    ]


def _where(old: Any) -> Sharding | None:
    """Where an array lies, or an abstract one is to lie; None where nobody said."""
    where = getattr(old, "sharding", None) if getattr(old, "committed", True) else None
    return NamedSharding(jax.sharding.get_mesh(), where.spec) if _is_abstract(where) else where


def _is_abstract(where: Sharding | None) -> bool:
    return isinstance(getattr(where, "mesh", None), AbstractMesh)


def place(array: np.ndarray, old: Any) -> jax.Array:
    """A JAX copy of `array` where `old` lies; an uncommitted one stays free to move.

    Each device is given its own part, straight out of `array` however that is strided: the one
    copy is the one that stays.
    """
    where = _where(old)
    if where is None:
        return _copied(array, None)
    parts = [
        _copied(array[*index, ...], SingleDeviceSharding(device, memory_kind=where.memory_kind))
        for device, index in where.addressable_devices_indices_map(array.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(array.shape, where, parts, dtype=array.dtype)


def _copied(array: np.ndarray, where: Sharding | None) -> jax.Array:
    made = jax.device_put(array, where).block_until_ready()
    # The CPU takes an aligned NumPy array as it is, and `may_alias=False` does not forbid it.
    on_cpu = {device.platform for device in made.devices()} == {"cpu"}
    if on_cpu and made.unsafe_buffer_pointer() == array.ctypes.data:
        return jax.device_put(np.array(array), where)
    return made


def _check_arguments(tensors: Any, layout: Any) -> None:
    check_layout(layout)
    if not isinstance(tensors, Mapping):
        hint = ": hand in its state_dict()" if hasattr(tensors, "state_dict") else ""
        kind = type(tensors).__name__
        raise TypeError(f"tensors: expected a mapping of names to tensors, got {kind}{hint}")


def check_layout(layout: Any) -> None:
    """Raises TypeError for what is no Layout."""
    if not isinstance(layout, Layout):
        raise TypeError(f"layout: expected a Layout such as LAYOUTS['gqa'], got {layout!r}")
