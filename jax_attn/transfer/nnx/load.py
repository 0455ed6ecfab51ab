"""A plan carried out on an NNX module, and its inverse."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from jax_attn.transfer.arrays import Tensors, read
from jax_attn.transfer.nnx.placement import place
from jax_attn.transfer.nnx.plan import Plan, check_layout, plan
from jax_attn.transfer.nnx.state import described, flatten, spelled, variables
from jax_attn.transfer.problems import Problem, TransferError
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.resolve import Move
from jax_attn.transfer.table.steps import MisfitError


def load(module: nnx.Module, tensors: Tensors, layout: Layout) -> Plan:
    """Write torch tensors into an NNX module through a table: every nnx.Param, or nothing.

    The arrays are copies of `tensors`, bit for bit, each with the sharding and device of the
    one it replaces; of a checkpoint one tensor is read at a time, and each device given its part.
    An abstract module (nnx.eval_shape) becomes a real one, and holds no old arrays meanwhile.
    Returns the plan that was carried out. Raises TransferError with every problem of the plan; the
    module is then as it was.
    """
    if isinstance(module, nnx.State):
        raise TypeError("module: expected an nnx.Module to write into, got an nnx.State")
    planned = plan(module, tensors, layout)
    if planned.problems:
        raise TransferError("load, nothing written", planned.problems)
    old = flatten(module)
    new: dict[str, jax.Array] = {}
    for move in planned.moves:
        new |= _moved(move, tensors, old)
    replaced = [
        (path, variable.replace(new[spelled(path)])) for path, variable in variables(module)
    ]
    nnx.update(module, nnx.from_flat_state(replaced))
    return planned


def export(module: nnx.Pytree | nnx.State, layout: Layout) -> dict[str, np.ndarray]:
    """Every nnx.Param of an NNX module as torch tensors, by torch key: the inverse of `load`.

    The arrays are copies, bit for bit; bfloat16 is ml_dtypes'. Raises TransferError.
    """
    check_layout(layout)
    arrays = flatten(module)
    _, problems = described(arrays)
    if problems:
        raise TransferError("export", problems)
    return {key: np.array(tensor, order="C") for key, tensor in layout.to_torch(arrays).items()}


def _moved(move: Move, tensors: Tensors, old: Mapping[str, Any]) -> dict[str, jax.Array]:
    """One row carried out; its tensors are released before the next row is read."""
    sources = tuple(read(tensors, key) for key in move.row.keys)
    try:
        arrays = move.row.to_flax(sources, move.path_shapes)
    except MisfitError as misfit:  # a step of the caller's own failed
        problem = Problem("refused", move.row.keys[0], f"{move.row}: {misfit}")
        raise TransferError("load, nothing written", [problem]) from misfit
    return {
        path: place(array, old[path]) for path, array in zip(move.row.paths, arrays, strict=True)
    }
