"""Loading and exporting ports through tables, and plans of what a load would do."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product, takewhile
from pathlib import Path
from typing import Any, overload

import jax
import numpy as np
from flax import nnx

from jax_attn.transfer.arrays import Spec, Tensors, describe, expect_mapping, read, specs
from jax_attn.transfer.files.checkpoint import Checkpoint
from jax_attn.transfer.files.port_folder import read_again, side_of
from jax_attn.transfer.kinds.held import HeldPort, rebuilt
from jax_attn.transfer.nnx.adapters import refuse_adapters
from jax_attn.transfer.nnx.into_torch import written_into
from jax_attn.transfer.nnx.placement import bytes_per_device, place, unplaceable
from jax_attn.transfer.nnx.variables import (
    Weights,
    carried,
    flatten,
    state_of,
    values_of,
    variables,
)
from jax_attn.transfer.problems import Problem, TransferError, listed, printable
from jax_attn.transfer.table.layout import LAYOUT_HINT, Layout, untied
from jax_attn.transfer.table.plan_table import passed_over_lines, printed
from jax_attn.transfer.table.reasons import problems_of, put_there
from jax_attn.transfer.table.resolve import Leftovers, Move, passed, resolve, unused
from jax_attn.transfer.table.rows import Row, regex, row
from jax_attn.transfer.table.steps import Shape


@dataclass(frozen=True, repr=False)
class Plan:
    """The rows that `load` would carry, and every reason why it would fail. Prints as a table.

    Attributes:
      moves: the rows that carry something.
      keys: the shape and dtype of every torch tensor, by key.
      paths: the shape and dtype of every parameter, by dotted path.
      problems: every reason why `load` would raise an error.
      passed_over: torch keys that are not carried, and why.
      unused: rows that match nothing on either side, such as one with a spelling mistake in both.
      per_device: bytes of the parameters that each device of a mesh holds; None without a mesh or
        if there are problems.
    """

    moves: list[Move]
    keys: dict[str, Spec]
    paths: dict[str, Spec]
    problems: list[Problem] = field(default_factory=list)
    passed_over: dict[str, str] = field(default_factory=dict)
    unused: list[Row] = field(default_factory=list)
    per_device: int | None = None

    def __str__(self) -> str:
        lines = [printed(self.moves, lambda move: self.paths[move.row.paths[0]].dtype)]
        lines += passed_over_lines(self.passed_over)
        lines += [printable(f"{r}: matches nothing on either side") for r in self.unused]
        if self.per_device is not None:
            total = sum(spec.nbytes for spec in self.paths.values())
            lines.append(f"each device holds {self.per_device:,} of {total:,} bytes")
        if self.problems:
            lines += ["", f"{len(self.problems)} problem(s):", *listed(self.problems)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Plan: {len(self.moves)} rows, {len(self.problems)} problems>"


def plan(module: Weights, tensors: Tensors, layout: Layout) -> Plan:
    """Plan what `load` would do, without doing it.

    Args:
      module: as for `load`; an abstract one, from `nnx.eval_shape` or `jax.eval_shape`, is enough.
      tensors: a mapping of torch keys to NumPy, JAX or torch tensors. Only shapes and dtypes are
        read, and the values of keys that the layout ties to others, to check that they are equal.
      layout: the transfer table.

    Returns:
      A `Plan`, with every problem that `load` would raise.

    Raises:
      TypeError: arguments of the wrong kind.
    """
    check_layout(layout)
    return _planned(carried(module, layout), tensors, layout)


def _planned(arrays: Mapping[str, Any], tensors: Tensors, layout: Layout) -> Plan:
    """Return the plan for the arrays of a module."""
    expect_mapping(tensors)
    paths, problems = _described(arrays)
    keys, unreadable = specs(tensors)
    problems += unreadable
    reported = {problem.name for problem in problems}
    layout = layout.tied_as(keys)
    key_shapes, path_shapes = _shapes(keys), _shapes(paths)
    moves, left = resolve(layout, key_shapes, path_shapes)
    misfits = [p for move in moves for p in _wrong_dtypes(move, keys, paths)]
    misfits += untied(layout, tensors)
    if left:
        misfits = [*_why_left(left, layout, key_shapes, path_shapes), *misfits]
    problems += [problem for problem in misfits if problem.name not in reported]
    problems += _narrowed(paths) + unplaceable(arrays)
    if not paths and not problems:
        problems.append(Problem("missing", "module", "expected at least one parameter, got none"))
    return Plan(
        *(moves, keys, paths, problems, passed(layout.passed_over, keys)),
        unused(layout.groups, keys, paths),
        per_device=None if problems else bytes_per_device(arrays),
    )


def _shapes(described: Mapping[str, Spec]) -> dict[str, Shape]:
    return {name: spec.shape for name, spec in described.items()}


def _why_left(
    left: Leftovers, layout: Layout, keys: Mapping[str, Shape], paths: Mapping[str, Shape]
) -> list[Problem]:
    """Return the reasons, or one in place of all if the table fits once its names have prefixes."""
    for torch_prefix, flax_prefix in product({"", _stem(keys)}, {"", _stem(paths)}):
        moves, misfits = resolve(layout.under(torch_prefix, flax_prefix), keys, paths)
        if moves and not misfits:
            lacking = " and ".join(
                f"{side} begin with {prefix!r}"
                for side, prefix in (("keys", torch_prefix), ("paths", flax_prefix))
                if prefix
            )
            text = f"the {lacking}{put_there(torch_prefix)}, but those of the table do not"
            hint = f'use layout.under("{torch_prefix}", "{flax_prefix}")'
            return [Problem("missing", torch_prefix or flax_prefix, text, hint)]
    return problems_of(left)


def _stem(names: Iterable[str]) -> str:
    """Return the leading parts that all dotted names share, apart from their last part."""
    parents = (name.split(".")[:-1] for name in names)
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))
    return ".".join(parts[0] for parts in alike)


def check_layout(layout: Any) -> None:
    """Raise TypeError unless this is a Layout."""
    if not isinstance(layout, Layout):
        kind = type(layout).__name__
        raise TypeError(f"layout: expected a Layout, got {kind}; {LAYOUT_HINT}")


@overload
def load(module: nnx.Module, tensors: Tensors, layout: Layout) -> Plan: ...


@overload
def load(module: Weights, tensors: Tensors, layout: Layout) -> Any: ...


def load(module: Weights, tensors: Tensors, layout: Layout) -> Any:
    """Write torch tensors into a port's weights through a table: every parameter, or nothing.

    The arrays are bit-identical copies of `tensors`, each with the sharding and device of the array
    that it replaces. From a checkpoint, one tensor is read at a time, and each device receives its
    part of it. An abstract module, from `nnx.eval_shape`, becomes a real one. A row may also name
    other state, such as the mean of a batch norm.

    Args:
      module: the nnx.Module to write into; a port of another kind, as `parity.check` takes them; or
        a tree of arrays, a mapping.
      tensors: a mapping of torch keys to NumPy, JAX or torch tensors.
      layout: the transfer table.

    Returns:
      For an nnx.Module, which is written into, the `Plan` that was carried out. Otherwise a new
      object of the kind that was handed in, with the new arrays; a Keras model is written into and
      returned.

    Raises:
      TransferError: every problem of the plan. The module is then unchanged.
    """
    if isinstance(module, nnx.State):
        raise TypeError("module: expected an nnx.Module to write into, got an nnx.State")
    check_layout(layout)
    own = state_of(module)
    found = variables(own, layout)
    old = values_of(found)
    planned = _planned(old, tensors, layout)
    if planned.problems:
        raise TransferError("load, nothing written", planned.problems)
    new: dict[str, jax.Array] = {}
    for move in planned.moves:
        # The tensors of one row are released before those of the next are read.
        sources = tuple(read(tensors, key) for key in move.row.keys)
        targets = move.carried("flax", sources, "load, nothing written")
        new |= {p: place(a, old[p]) for p, a in zip(move.row.paths, targets, strict=True)}
        del sources, targets
    replaced = [(path, variable.replace(new[dotted])) for dotted, (path, variable) in found.items()]
    nnx.update(own, nnx.from_flat_state(replaced))
    return rebuilt(own) if isinstance(own, HeldPort) and own is not module else planned


def load_flax(module: nnx.Module, folder: str | Path) -> Plan:
    """Write the arrays of a folder into an NNX module: every nnx.Param, or nothing.

    Like `load`, but names and shapes are already the module's, not torch's.

    Args:
      module: the nnx.Module to write into; an abstract one becomes a real one.
      folder: the output of `jax-attn port --to flax`.

    Returns:
      The `Plan` that was carried out.

    Raises:
      TransferError: every path that differs between the folder and the module, in name, shape or
        dtype. The module is then unchanged.
    """
    folder = Path(folder)
    if side_of(folder) == "torch":
        text = "expected the Flax side of a checkpoint, got the torch side"
        hint = "use transfer.load and a table"
        raise TransferError("load_flax", [Problem("refused", str(folder), text, hint)])
    tensors = read_again(folder)
    with tensors if isinstance(tensors, Checkpoint) else nullcontext():
        return load(module, tensors, Layout(*(row(path, path) for path in flatten(module))))


def export(module: Weights, layout: Layout, *, into: Any = None) -> dict[str, np.ndarray]:
    """Read a port's weights as torch tensors, by torch key: the inverse of `load`.

    Args:
      module: an nnx.Module, an nnx.State, a port of another kind, or a tree of arrays, a mapping.
      layout: the transfer table.
      into: a torch module to write the tensors into, in place: every parameter and buffer of its
        state dict, or nothing. Those that the table ignores stay as they are.

    Returns:
      A dict of NumPy arrays, bit-identical copies; bfloat16 is ml_dtypes'. With `into`, by the
      names of that module.

    Raises:
      TransferError: every reason why the module does not fit the table, or why `into` does not.
        Arrays of low-rank adapters that no row carries are refused: `merge_lora` merges them.
    """
    check_layout(layout)
    own = state_of(module)
    arrays = values_of(variables(own, layout))
    _, problems = _described(arrays)
    problems += refuse_adapters(own, _read(layout, arrays))
    if problems:
        raise TransferError("export", problems)
    if into is None:
        tensors = layout.to_torch(arrays)
        return {key: np.array(tensor, order="C") for key, tensor in tensors.items()}
    return written_into(into, arrays, layout)


def _read(layout: Layout, paths: Iterable[str]) -> list[str]:
    patterns = [regex(pattern) for pattern in layout.flax_paths()]
    return [path for path in paths if any(pattern.fullmatch(path) for pattern in patterns)]


def _described(arrays: Mapping[str, Any]) -> tuple[dict[str, Spec], list[Problem]]:
    """Return shapes and dtypes by path, and a problem for each parameter that holds no array."""
    paths, problems = {}, []
    for path, array in arrays.items():
        if hasattr(array, "shape") and hasattr(array, "dtype"):
            paths[path] = describe(array)
        else:
            text = f"expected the parameter to hold an array, got {type(array).__name__}"
            problems.append(Problem("unreadable", path, text))
    return paths, problems


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


def _narrowed(paths: dict[str, Spec]) -> list[Problem]:
    """Report paths of dtypes that jax would silently narrow."""
    problems = []
    for path, spec in paths.items():
        held = str(jax.dtypes.canonicalize_dtype(np.dtype(spec.dtype)))
        if held != spec.dtype:
            text = f"expected a dtype that jax holds here, got {spec.dtype}, narrowed to {held}"
            problems.append(Problem("wrong dtype", path, text, "enable x64 around the load"))
    return problems
