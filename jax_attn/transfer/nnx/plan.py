"""What a load would do, and every reason why it would not."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx

from jax_attn.transfer.arrays import Spec, Tensors, specs
from jax_attn.transfer.nnx.placement import unplaceable
from jax_attn.transfer.nnx.state import described, flatten
from jax_attn.transfer.problems import Problem, listed
from jax_attn.transfer.table import resolve
from jax_attn.transfer.table.layout import Layout, untied
from jax_attn.transfer.table.plan_table import passed_over_lines, printed
from jax_attn.transfer.table.resolve import Move


@dataclass(frozen=True, repr=False)
class Plan:
    """What a load would do, row by row, and every reason why it would not. Prints as a table.

    keys, paths: shape and dtype of every torch tensor and of every nnx.Param. passed_over: torch
    keys that are not carried, and why.
    """

    moves: list[Move]
    keys: dict[str, Spec]
    paths: dict[str, Spec]
    problems: list[Problem] = field(default_factory=list)
    passed_over: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [printed(self.moves, lambda move: self.paths[move.row.paths[0]].dtype)]
        lines += passed_over_lines(self.passed_over)
        if self.problems:
            lines += ["", f"{len(self.problems)} problem(s):", *listed(self.problems)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Plan: {len(self.moves)} rows, {len(self.problems)} problems>"


def plan(module: nnx.Pytree | nnx.State, tensors: Tensors, layout: Layout) -> Plan:
    """What `load` would do, without doing it.

    module: an nnx.Module; an abstract one (nnx.eval_shape) will do. tensors: torch key to
    NumPy, JAX or torch tensor; only the shapes and dtypes are read, and of keys that the layout
    ties to others the values, which must be equal. Returns a Plan that holds every problem that
    `load` would raise; raises only TypeError, for arguments of the wrong kind.
    """
    check_layout(layout)
    if not isinstance(tensors, Mapping):
        hint = ": hand in its state_dict()" if hasattr(tensors, "state_dict") else ""
        kind = type(tensors).__name__
        raise TypeError(f"tensors: expected a mapping of names to tensors, got {kind}{hint}")
    arrays = flatten(module)
    paths, problems = described(arrays)
    keys, unreadable = specs(tensors)
    problems += unreadable
    unknown = {problem.name for problem in problems}  # of these enough is said
    passed_over = resolve.passed(layout.passed_over, keys)
    moves, misfits = resolve.for_loading(
        layout.groups,
        layout.refusals,
        {key: spec.shape for key, spec in keys.items() if key not in passed_over},
        {path: spec.shape for path, spec in paths.items()},
    )
    misfits += [problem for move in moves for problem in _wrong_dtypes(move, keys, paths)]
    problems += [p for p in misfits + untied(layout, tensors) if p.name not in unknown]
    problems += _narrowed(paths) + unplaceable(arrays)
    if not paths and not problems:
        problems.append(Problem("missing", "module", "expected at least one nnx.Param, got none"))
    return Plan(moves, keys, paths, problems, passed_over)


def check_layout(layout: Any) -> None:
    """Raises TypeError for what is no Layout."""
    if not isinstance(layout, Layout):
        raise TypeError(f"layout: expected a Layout such as LAYOUTS['gqa'], got {layout!r}")


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
    """Paths of dtypes that jax would silently narrow."""
    problems = []
    for path, spec in paths.items():
        held = str(jax.dtypes.canonicalize_dtype(np.dtype(spec.dtype)))
        if held != spec.dtype:
            text = f"expected a dtype that jax holds here, got {spec.dtype}, narrowed to {held}"
            problems.append(Problem("wrong dtype", path, text, "enable x64 around the load"))
    return problems
