"""A checkpoint through a table, whole: the plan, with every reason why not. Needs no framework."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np

from jax_attn.transfer.arrays import Spec, read, specs
from jax_attn.transfer.files.safetensors_file import DTYPE_OF_CODE
from jax_attn.transfer.port import checks
from jax_attn.transfer.port import shapes as port_shapes
from jax_attn.transfer.port import values as port_values
from jax_attn.transfer.port.checks import SIZED
from jax_attn.transfer.port.table import PortTable
from jax_attn.transfer.port.values import FLOATS
from jax_attn.transfer.problems import Problem, TransferError, nearest, printable
from jax_attn.transfer.table import resolve
from jax_attn.transfer.table.layout import Layout, untied
from jax_attn.transfer.table.plan_table import printed
from jax_attn.transfer.table.resolve import Move
from jax_attn.transfer.table.rows import Row, bindings, ignored
from jax_attn.transfer.table.step import HeadSizes, Shape

Side = Literal["flax", "torch"]

_FROM = {"flax": "keys", "torch": "paths"}
_TO = {"flax": "paths", "torch": "keys"}


@dataclass(frozen=True, repr=False)
class PortPlan:
    """What a port would do, and every reason why it would not.

    to: the side that is written. sources, targets: shape and dtype by name, before and after.
    passed_over: names that are not carried, and why. unused: Flax modules of the table of which
    nothing is there; none where nothing is planned at all. dtype: what floating numbers are cast
    to; None for no cast.
    """

    to: Side
    moves: list[Move]
    sources: dict[str, Spec]
    targets: dict[str, Spec]
    passed_over: dict[str, str]
    unused: list[str]
    dtype: str | None
    problems: list[Problem]

    def __repr__(self) -> str:
        return f"<PortPlan to {self.to}: {len(self.moves)} rows, {len(self.problems)} problems>"

    def __str__(self) -> str:
        table = [printed(self.moves, self._dtype)] if self.moves else []
        over = [printable(f"{k}: passed over: {why}") for k, why in self.passed_over.items()]
        unused = [f"in the table, and not there: {', '.join(self.unused)}"] if self.unused else []
        return "\n".join([*table, *over, *unused])

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        head = ("torch", "torch_shapes", "flax", "flax_shapes", "dtype", "steps")
        rows = (
            (
                *(m.row.keys, m.key_shapes, m.row.paths, m.path_shapes, self._dtype(m)),
                [step.name for step in m.row.steps],
            )
            for m in self.moves
        )
        return {
            "to": self.to,
            "rows": [dict(zip(head, row, strict=True)) for row in rows],
            "passed_over": self.passed_over,
            "unused": self.unused,
            "problems": [problem._asdict() for problem in self.problems],
        }

    @property
    def source_bytes(self) -> int:
        """Of all tensors that are there."""
        return sum(spec.nbytes for spec in self.sources.values())

    def _dtype(self, move: Move) -> str:
        spec = self.targets.get(self.made(move)[0])
        return spec.dtype if spec else "–"

    def made_of(self, move: Move) -> tuple[str, ...]:
        """The names that a move reads."""
        return getattr(move.row, _FROM[self.to])

    def made(self, move: Move) -> tuple[str, ...]:
        """The names that a move writes."""
        return getattr(move.row, _TO[self.to])

    def read(self, source: Mapping[str, Any], move: Move) -> tuple[np.ndarray, ...]:
        """What a move reads, cast where that is asked for."""
        arrays = (read(source, name) for name in self.made_of(move))
        if self.dtype is None:
            return tuple(arrays)
        return tuple(port_values.recast(array, self.dtype) for array in arrays)


def plan_port(
    source: Mapping[str, Any],
    table: PortTable,
    to: Side,
    *,
    ignore: Sequence[str] = (),
    dtype: str | None = None,
    lossy: bool = False,
    allow_nonfinite: bool = False,
    looked_at: Callable[[int], None] = lambda count: None,
) -> PortPlan:
    """What a port would do. Looks at every number; writes nothing and raises nothing.

    source: torch keys, or dotted Flax paths, to tensors. ignore: patterns with * and ? of names
    to pass over. dtype: what floating numbers are cast to; that must lose nothing, unless lossy.
    looked_at: told how many bytes were.
    """
    found, unreadable = specs(source)
    layout, problems = _ignoring(table.layout, ignore, found)
    passed_over = resolve.passed(layout.passed_over, found)
    problems += [p for p in unreadable if p.name not in passed_over]
    left = {name: spec for name, spec in found.items() if name not in passed_over}
    problems += [
        Problem(
            "wrong dtype",
            name,
            f"expected one of {', '.join(DTYPE_OF_CODE.values())}, got {s.dtype}",
        )
        for name, s in left.items()
        if s.dtype not in DTYPE_OF_CODE.values()
    ]
    shapes = {name: spec.shape for name, spec in left.items()}
    if not shapes and not problems:
        problems.append(Problem("missing", "tensors", "expected at least one, got none"))
    moves, misfits = _moves(table, layout, shapes, to)
    problems += [p for p in misfits if p.name not in {u.name for u in unreadable}]
    places = [place for place, _ in table.blocks]
    names = [*left, *(p.name for p in unreadable if p.name not in passed_over)]
    problems += checks.uneven(layout, names, _FROM[to])
    problems += checks.missing_parts(layout, table.beside, places, [*found, *names], _FROM[to])
    targets, mixed = _targets(moves, left, to, dtype)
    paths = reached(layout, names) if to == "flax" else names
    problems += mixed
    problems += checks.incomplete(table.blocks, paths) if table.blocks else []
    problems += [] if table.blocks else checks.some_biases(paths)
    problems += checks.other_layers(table.config, places)
    problems += checks.wrong_widths(moves, table.blocks)
    problems += _weights_of_no_floats(moves, left, to) if table.blocks else []
    if table.sizes is not None:
        problems += checks.wrong_heads(moves, table.sizes)
    shapeless = {problem.name for problem in problems}  # of these enough is said
    wrong = {problem.name: problem for problem in port_shapes.unlike(layout, shapes, _FROM[to])}
    if table.blocks:
        traits = table.blocks[0][1]
        more = port_shapes.wrong_axes(moves, traits, table.config, _FROM[to])
        wrong |= {problem.name: problem for problem in more}
    problems += [problem for name, problem in wrong.items() if name not in shapeless]
    if to == "flax" and not unreadable:
        problems += untied(layout, source)
    for name, spec in left.items():
        if spec.dtype in DTYPE_OF_CODE.values():
            values = port_values.bad_values(
                source, name, spec, dtype, lossy=lossy, allow_nonfinite=allow_nonfinite
            )
            problems += values
        looked_at(spec.nbytes)
    used = [path for move in moves for path in move.row.paths]
    unused = _unused(layout, used) if moves else []
    problems = list(dict.fromkeys(problems))
    return PortPlan(to, moves, found, targets, passed_over, unused, dtype, problems)


def _ignoring(
    layout: Layout, patterns: Sequence[str], names: Iterable[str]
) -> tuple[Layout, list[Problem]]:
    """The layout with what the caller passes over; a pattern that meets nothing is a mistake."""
    met = {pattern: [n for n in names if fnmatchcase(n, pattern)] for pattern in patterns}
    items = [ignored(n, f"--ignore {pattern}") for pattern, found in met.items() for n in found]
    problems = [
        Problem(
            "missing", pattern, "expected names to pass over, none is so", nearest(pattern, names)
        )
        for pattern, found in met.items()
        if not found
    ]
    return Layout(layout, *items), problems


def _moves(
    table: PortTable, layout: Layout, shapes: Mapping[str, Shape], to: Side
) -> tuple[list[Move], list[Problem]]:
    if to == "torch":
        return resolve.for_export(layout.groups, shapes)
    steps = {step for r in _rows(layout) for step in r.steps}
    if table.sizes is None and steps & {*SIZED}:
        text = "cannot be inferred from shapes"
        hint = "--num-heads and --head-dim, or a config.json beside the checkpoint that has them"
        return [], [Problem("missing", "num_heads, head_dim", text, hint)]
    try:
        paths = layout.shapes(shapes, table.sizes or HeadSizes(1, 1, 1))
    except TransferError as error:
        return [], error.problems
    return resolve.for_loading(layout.groups, layout.refusals, shapes, paths)


def _targets(
    moves: Iterable[Move], sources: Mapping[str, Spec], to: Side, dtype: str | None
) -> tuple[dict[str, Spec], list[Problem]]:
    """Shape and dtype of what is written; and tensors of several dtypes that become one."""
    targets: dict[str, Spec] = {}
    problems = []
    for move in moves:
        names, before = getattr(move.row, _TO[to]), getattr(move.row, _FROM[to])
        dtypes = {_cast(sources[name].dtype, dtype) for name in before}
        if len(dtypes) > 1:
            text = f"expected one dtype for all of {', '.join(before)}, got {sorted(dtypes)}"
            problems.append(Problem("wrong dtype", before[0], text, "--dtype casts them"))
            continue
        shapes = move.path_shapes if to == "flax" else move.key_shapes
        targets |= {n: Spec(s, *dtypes) for n, s in zip(names, shapes, strict=True)}
    return targets, problems


def _weights_of_no_floats(
    moves: Iterable[Move], sources: Mapping[str, Spec], to: Side
) -> list[Problem]:
    """Kernels, scales, biases and embeddings that are whole numbers or true and false."""
    return [
        Problem("wrong dtype", name, f"expected one of {', '.join(FLOATS)}, got {dtype}")
        for move in moves
        for name in getattr(move.row, _FROM[to])
        if (dtype := sources[name].dtype) in DTYPE_OF_CODE.values() and dtype not in FLOATS
    ]


def _cast(dtype: str, to: str | None) -> str:
    return to if to is not None and dtype in FLOATS else dtype


def reached(layout: Layout, keys: Iterable[str]) -> list[str]:
    """The Flax paths of rows whose keys are there, whatever their shapes."""
    keys = list(keys)
    return [p for r in _rows(layout) for b in bindings(r.keys, keys) for p in r.at(b).paths]


def _unused(layout: Layout, used: Iterable[str]) -> list[str]:
    """Flax modules that the table has and of which nothing is there."""
    used = {path.rpartition(".")[0] for path in used}
    modules = dict.fromkeys(path.rpartition(".")[0] for r in _rows(layout) for path in r.paths)
    return [module for module in modules if not bindings([module], used)]


def _rows(layout: Layout) -> list[Row]:
    return [r for group in layout.groups for a in group.alternatives for r in a]
