"""Plan of a whole checkpoint's port, with every reason against it. Needs no framework."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np

from jax_attn.dtypes import DTYPES
from jax_attn.families.family import other_layers
from jax_attn.porting.port import parts, shapes
from jax_attn.porting.port.parts import RowSide
from jax_attn.porting.port.table import PortTable
from jax_attn.transfer.arrays import Spec, Tensors, read, recast, specs
from jax_attn.transfer.files.safetensors_file import DTYPE_OF_CODE
from jax_attn.transfer.problems import Problem, TransferError, nearest
from jax_attn.transfer.table.layout import Layout, moves_by_sizes, untied
from jax_attn.transfer.table.plan_table import passed_over_lines, printed
from jax_attn.transfer.table.reasons import problems_of
from jax_attn.transfer.table.resolve import Move, passed, resolve
from jax_attn.transfer.table.rows import Row, bindings, ignored
from jax_attn.transfer.table.steps import Shape, Sizes

Side = Literal["flax", "torch"]

LookedAt = Callable[[int], None]
"""Called with the number of bytes that were checked."""

_FROM: dict[Side, RowSide] = {"flax": "keys", "torch": "paths"}
_TO: dict[Side, RowSide] = {"flax": "paths", "torch": "keys"}
_DTYPES = (*DTYPE_OF_CODE.values(),)
_CHUNK = 2**22
"""Number of values to check at a time."""


@dataclass(frozen=True, repr=False)
class PortPlan:
    """The rows that a port would carry, and every reason why it cannot.

    to: the side that is written. sources, targets: shape and dtype by name, before and after.
    passed_over: names that are not carried, and why. unused: Flax modules of the table that the
    source lacks; empty if there are no moves. dtype: what floating-point numbers are cast to; None
    for no cast.
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
        over = passed_over_lines(self.passed_over)
        unused = (
            [f"in the table, but not in the checkpoint: {', '.join(self.unused)}"]
            if self.unused
            else []
        )
        return "\n".join([*table, *over, *unused])

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
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
        """Size in bytes of all source tensors."""
        return sum(spec.nbytes for spec in self.sources.values())

    def _dtype(self, move: Move) -> str:
        spec = self.targets.get(self.writes(move)[0])
        return spec.dtype if spec else "–"

    def reads(self, move: Move) -> tuple[str, ...]:
        """Return the names that a move reads."""
        return getattr(move.row, _FROM[self.to])

    def writes(self, move: Move) -> tuple[str, ...]:
        """Return the names that a move writes."""
        return getattr(move.row, _TO[self.to])

    def read(self, source: Tensors, move: Move) -> tuple[np.ndarray, ...]:
        """Return the arrays that a move reads, cast if so requested."""
        arrays = (read(source, name) for name in self.reads(move))
        if self.dtype is None:
            return tuple(arrays)
        return tuple(recast(array, self.dtype) for array in arrays)


def plan_port(
    source: Tensors,
    table: PortTable,
    to: Side,
    *,
    ignore: Sequence[str] = (),
    dtype: str | None = None,
    lossy: bool = False,
    allow_nonfinite: bool = False,
    looked_at: LookedAt = lambda count: None,
) -> PortPlan:
    """Plan a port: check every number, write nothing and raise nothing.

    source: torch keys, or dotted Flax paths, to tensors. ignore: patterns with * and ? of names to
    pass over. dtype: what floating-point numbers are cast to; the cast must be lossless unless
    `lossy`.
    """
    described, unreadable = specs(source)
    layout, problems = _ignoring(table.layout, ignore, described)
    if to == "flax":
        layout = layout.tied_as([*described, *(problem.name for problem in unreadable)])
    passed_over = passed(layout.passed_over, described)
    carried = {name: spec for name, spec in described.items() if name not in passed_over}
    hidden = [p for p in unreadable if p.name not in passed_over]
    names = [*carried, *(p.name for p in hidden)]
    problems += [*hidden, *_not_written(carried)]
    if not carried and not problems:
        problems.append(Problem("missing", "tensors", "expected at least one, got none"))

    moves, misfits = _moves(table, layout, {n: spec.shape for n, spec in carried.items()}, to)
    problems += [p for p in misfits if p.name not in {u.name for u in unreadable}]
    targets, mixed = _targets(moves, carried, to, dtype)
    problems += _wrong_parts(table, layout, names, described, to)
    problems += [*mixed, *(_not_floating(moves, carried, to) if table.blocks else ())]
    problems += _wrong_shapes(table, layout, moves, carried, to, {p.name for p in problems})
    if to == "flax" and not unreadable:
        problems += untied(layout, source)
    for name, spec in carried.items():
        problems += _bad_values(source, name, spec, dtype, lossy, allow_nonfinite)
        looked_at(spec.nbytes)
    used = [path for move in moves for path in move.row.paths]
    unused = _unused(layout, used) if moves else []
    problems = list(dict.fromkeys(problems))
    return PortPlan(to, moves, described, targets, passed_over, unused, dtype, problems)


def reached(layout: Layout, keys: Iterable[str]) -> list[str]:
    """Return the Flax paths of rows whose keys are present, whatever their shapes."""
    keys = list(keys)
    return [p for r in _rows(layout) for b in bindings(r.keys, keys) for p in r.at(b).paths]


# --- the plan -----------------------------------------------------------------------------------


def _ignoring(
    layout: Layout, patterns: Sequence[str], names: Iterable[str]
) -> tuple[Layout, list[Problem]]:
    """Return the layout that passes over the caller's patterns; report patterns without a match."""
    matches = {pattern: [n for n in names if fnmatchcase(n, pattern)] for pattern in patterns}
    items = [ignored(n, f"--ignore {pattern}") for pattern, each in matches.items() for n in each]
    text = "expected a pattern of tensors' names, but it matches none"
    problems = [
        Problem("missing", pattern, text, nearest(pattern, names))
        for pattern, each in matches.items()
        if not each
    ]
    return Layout(layout, *items), problems


def _moves(
    table: PortTable, layout: Layout, shapes_by_name: Mapping[str, Shape], to: Side
) -> tuple[list[Move], list[Problem]]:
    if to == "torch":
        moves, left = resolve(layout, None, shapes_by_name)
        return moves, problems_of(left)
    steps = {step for r in _rows(layout) for step in r.steps}
    if table.sizes is None and not steps.isdisjoint(shapes.SIZED):
        text = "cannot be inferred from shapes"
        hint = "pass --num-heads and --head-dim, or put a config.json next to the checkpoint"
        return [], [Problem("missing", "num_heads, head_dim", text, hint)]
    try:
        return moves_by_sizes(layout, shapes_by_name, table.sizes or Sizes(1, 1, 1)), []
    except TransferError as error:
        return [], error.problems


def _targets(
    moves: Iterable[Move], sources: Mapping[str, Spec], to: Side, dtype: str | None
) -> tuple[dict[str, Spec], list[Problem]]:
    """Return shape and dtype of what is written; report mixed dtypes within one target."""
    targets: dict[str, Spec] = {}
    problems = []
    for move in moves:
        before = getattr(move.row, _FROM[to])
        held = {sources[name].dtype for name in before}
        dtypes = {dtype if dtype is not None and name in DTYPES else name for name in held}
        if len(dtypes) > 1:
            text = f"expected one dtype for all of {', '.join(before)}, got {sorted(dtypes)}"
            problems.append(
                Problem("wrong dtype", before[0], text, "pass --dtype to cast them all")
            )
            continue
        targets |= {name: Spec(s, *dtypes) for name, s in getattr(move, _TO[to]).items()}
    return targets, problems


def _unused(layout: Layout, used: Iterable[str]) -> list[str]:
    """Return Flax modules of the table that have no path among those used."""
    used = {path.rpartition(".")[0] for path in used}
    modules = dict.fromkeys(path.rpartition(".")[0] for path in layout.flax_paths())
    return [module for module in modules if not bindings([module], used)]


def _rows(layout: Layout) -> list[Row]:
    return [r for group in layout.groups for a in group.alternatives for r in a]


# --- its problems -------------------------------------------------------------------------------


def _not_written(carried: Mapping[str, Spec]) -> list[Problem]:
    """Report tensors of dtypes that no file format here holds."""
    return [
        Problem("wrong dtype", name, f"expected one of {', '.join(_DTYPES)}, got {spec.dtype}")
        for name, spec in carried.items()
        if spec.dtype not in _DTYPES
    ]


def _not_floating(
    moves: Iterable[Move], sources: Mapping[str, Spec], to: Side
) -> Iterator[Problem]:
    """Report kernels, scales, biases and embeddings that hold integers or booleans."""
    for move in moves:
        for name in getattr(move.row, _FROM[to]):
            dtype = sources[name].dtype
            if dtype in _DTYPES and dtype not in DTYPES:
                text = f"expected one of {', '.join(DTYPES)}, got {dtype}"
                yield Problem("wrong dtype", name, text)


def _wrong_parts(
    table: PortTable, layout: Layout, names: Sequence[str], described: Iterable[str], to: Side
) -> list[Problem]:
    """Report missing parts. names: those carried; described: all readable, passed over or not."""
    side, places = _FROM[to], [place for place, _ in table.blocks]
    paths = reached(layout, names) if to == "flax" else names
    return [
        *parts.uneven(layout, names, side),
        *parts.missing_parts(layout, table.beside, places, [*described, *names], side),
        *(
            parts.incomplete(table.blocks, paths)
            if table.blocks
            else parts.some_biases(layout, paths)
        ),
        *other_layers(table.config, places),
    ]


def _wrong_shapes(
    table: PortTable,
    layout: Layout,
    moves: Sequence[Move],
    carried: Mapping[str, Spec],
    to: Side,
    reported: Set[str],
) -> list[Problem]:
    """Report wrong shapes; reported: names whose shapes follow from other problems."""
    problems = [*shapes.wrong_widths(moves, table.blocks)]
    problems += shapes.wrong_heads(moves, table.sizes) if table.sizes is not None else ()
    reported = reported | {problem.name for problem in problems}
    by_name = {name: spec.shape for name, spec in carried.items()}
    others = [*shapes.unlike(layout, by_name, _FROM[to])]
    if table.blocks:
        others += shapes.wrong_axes(moves, table.blocks[0][1], table.config, _FROM[to])
    last = {problem.name: problem for problem in others}
    return problems + [problem for name, problem in last.items() if name not in reported]


def _bad_values(
    tensors: Tensors,
    key: str,
    spec: Spec,
    dtype: str | None,
    lossy: bool,
    allow_nonfinite: bool,
) -> Iterator[Problem]:
    """Report values of a tensor that are not finite, and those that `dtype` cannot represent.

    dtype: what floating-point numbers are cast to; None for no cast. lossy: whether values may
    change.
    """
    if spec.dtype not in DTYPES:
        return
    to = dtype if dtype not in (None, spec.dtype) and not lossy else None
    nans = infinite = changed = overflown = 0
    flat = read(tensors, key).reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        finite = np.isfinite(part)
        nans += int(np.isnan(part).sum())
        infinite += int(np.isinf(part).sum())
        if to is not None:
            cast = recast(part, to)
            changed += int((finite & (recast(cast, spec.dtype) != part)).sum())
            overflown += int((finite & ~np.isfinite(cast)).sum())
    if (nans or infinite) and not allow_nonfinite:
        text = f"expected finite numbers, got {nans} NaN and {infinite} infinite of {flat.size}"
        yield Problem("not finite", key, text, "pass --allow-nonfinite to carry them")
    if changed:
        text = (
            f"expected {to} to hold its {spec.dtype} numbers, but {changed} of {flat.size} change"
        )
        text += f", {overflown} of them to infinity" if overflown else ""
        yield Problem("wrong dtype", key, text, "pass --lossy to round them")
