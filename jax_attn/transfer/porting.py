"""A checkpoint through a table, whole: planned with every reason why not, made tensor by tensor,
and proved against what it was made of. Needs no framework.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import numpy as np

from jax_attn.transfer import port_checks, resolve
from jax_attn.transfer.arrays import Spec, read, specs
from jax_attn.transfer.layout import Layout, untied
from jax_attn.transfer.port_checks import FLOATS, SIZED
from jax_attn.transfer.port_table import Table
from jax_attn.transfer.problems import Problem, TransferError, grid, nearest
from jax_attn.transfer.resolve import Move
from jax_attn.transfer.rows import Row, bindings, ignored
from jax_attn.transfer.safetensors_file import DTYPES
from jax_attn.transfer.steps import Shape, Sizes

Side = Literal["flax", "torch"]

_FROM = {"flax": "keys", "torch": "paths"}
_TO = {"flax": "paths", "torch": "keys"}


@dataclass(frozen=True, repr=False)
class Port:
    """What a port would do, and every reason why it would not.

    to: the side that is written. sources, targets: shape and dtype by name, before and after.
    passed_over: names that are not carried, and why. unused: Flax modules of
    the table, and of which nothing is there.
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
        return f"<Port to {self.to}: {len(self.moves)} rows, {len(self.problems)} problems>"

    def __str__(self) -> str:
        table = grid(
            ("torch", "shape", "flax", "shape", "dtype", "steps"), map(self._line, self.moves)
        )
        over = [f"{name}: passed over: {why}" for name, why in self.passed_over.items()]
        unused = [f"in the table, and not there: {', '.join(self.unused)}"] if self.unused else []
        return "\n".join([table, *over, *unused])

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        head = ("torch", "torch_shapes", "flax", "flax_shapes", "dtype", "steps")
        rows = (
            (m.row.keys, m.key_shapes, m.row.paths, m.path_shapes, self._dtype(m), _steps(m))
            for m in self.moves
        )
        return {
            "to": self.to,
            "rows": [dict(zip(head, row, strict=True)) for row in rows],
            "passed_over": self.passed_over,
            "unused": self.unused,
            "problems": [problem._asdict() for problem in self.problems],
        }

    def _dtype(self, move: Move) -> str:
        spec = self.targets.get(self.made(move)[0])
        return spec.dtype if spec else "–"

    def _line(self, move: Move) -> tuple[str, ...]:
        return (
            ", ".join(move.row.keys),
            ", ".join(str(list(shape)) for shape in move.key_shapes),
            ", ".join(move.row.paths),
            ", ".join(str(list(shape)) for shape in move.path_shapes),
            self._dtype(move),
            " ".join(_steps(move)) or "=",
        )

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
        return tuple(port_checks.recast(array, self.dtype) for array in arrays)


def plan_port(
    source: Mapping[str, Any],
    table: Table,
    to: Side,
    *,
    ignore: Sequence[str] = (),
    dtype: str | None = None,
    lossy: bool = False,
    allow_nonfinite: bool = False,
    looked_at: Callable[[int], None] = lambda count: None,
) -> Port:
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
        Problem("wrong dtype", name, f"expected one of {', '.join(DTYPES.values())}, got {s.dtype}")
        for name, s in left.items()
        if s.dtype not in DTYPES.values()
    ]
    shapes = {name: spec.shape for name, spec in left.items()}
    if not shapes and not problems:
        problems.append(Problem("missing", "tensors", "expected at least one, got none"))
    moves, misfits = _moves(table, layout, shapes, to)
    problems += [p for p in misfits if p.name not in {u.name for u in unreadable}]
    problems += port_checks.uneven(layout, left, _FROM[to])
    targets, mixed = _targets(moves, left, to, dtype)
    paths = _reached(layout, left) if to == "flax" else left
    problems += mixed
    problems += port_checks.incomplete(table.blocks, paths) if table.blocks else []
    problems += [] if table.blocks else port_checks.some_biases(paths)
    problems += port_checks.too_few_layers(table.config, [place for place, _ in table.blocks])
    if table.sizes is not None:
        problems += port_checks.wrong_heads(moves, table.sizes)
    if to == "flax" and not unreadable:
        problems += untied(layout, source)
    for name, spec in left.items():
        if spec.dtype in DTYPES.values():
            values = port_checks.bad_values(
                source, name, spec, dtype, lossy=lossy, allow_nonfinite=allow_nonfinite
            )
            problems += values
        looked_at(size(spec))
    unused = _unused(layout, [path for move in moves for path in move.row.paths])
    problems = list(dict.fromkeys(problems))
    return Port(to, moves, found, targets, passed_over, unused, dtype, problems)


class Carried(Mapping[str, np.ndarray]):
    """What a port writes, by name; each made when it is asked for."""

    def __init__(
        self,
        port: Port,
        source: Mapping[str, Any],
        looked_at: Callable[[int], None] = lambda count: None,
    ):
        self._port, self._source, self._looked_at = port, source, looked_at
        self._moves = {
            name: (move, i) for move in port.moves for i, name in enumerate(port.made(move))
        }

    def __getitem__(self, name: str) -> np.ndarray:
        move, i = self._moves[name]
        arrays = _carry(self._port.to, move, self._port.read(self._source, move))
        self._looked_at(arrays[i].nbytes)
        return arrays[i]

    def __iter__(self) -> Iterator[str]:
        return iter(self._moves)

    def __len__(self) -> int:
        return len(self._moves)

    def describe(self, name: str) -> Spec:
        """Shape and dtype name of one tensor, without making it."""
        self._moves[name]
        return self._port.targets[name]


class Proof(NamedTuple):
    """Bytes of the source: carried and found again to the bit, passed over; and of the target.

    problems: what did not come back as it was.
    """

    carried: int
    passed_over: int
    written: int
    problems: list[Problem]

    def __str__(self) -> str:
        return (
            f"{self.carried + self.passed_over:,} bytes: {self.carried:,} carried and found again "
            f"to the bit, {self.passed_over:,} passed over; {self.written:,} bytes written"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return self._asdict() | {"problems": [problem._asdict() for problem in self.problems]}


def prove(
    port: Port,
    source: Mapping[str, Any],
    written: Mapping[str, Any],
    looked_at: Callable[[int], None] = lambda count: None,
) -> Proof:
    """Take what was written back through the table, and compare it with the source to the bit.

    written: what was read again. With a dtype, the source counts as it was cast.
    """
    found, problems = specs(written)
    problems += [
        Problem("unexpected", name, f"written, and in no plan, {spec}")
        for name, spec in found.items()
        if name not in port.targets
    ]
    problems += [
        Problem("unwritten", name, f"expected {spec}, read again as {found.get(name)}")
        for name, spec in port.targets.items()
        if found.get(name) != spec
    ]
    carried = set()
    for move in port.moves if not problems else ():
        arrays = tuple(read(written, name) for name in port.made(move))
        back = _carry_back(port.to, move, arrays)
        for name, was, now in zip(port.made_of(move), port.read(source, move), back, strict=True):
            carried.add(name)
            if not same_bits(was, now):
                text = "does not come back from what was written as it was, bit for bit"
                problems.append(Problem("unwritten", name, text))
            looked_at(now.nbytes)
    left = port.sources.keys() - carried - port.passed_over.keys()
    problems += [Problem("unwritten", name, "read by no row") for name in sorted(left)]
    return Proof(
        sum(size(port.sources[name]) for name in carried),
        sum(size(port.sources[name]) for name in port.passed_over if name in port.sources),
        sum(map(size, port.targets.values())),
        problems,
    )


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are one another's copy; some rows at a time, whatever their strides."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    a, b = np.atleast_1d(a), np.atleast_1d(b)
    step = max(1, len(a) * 2**24 // max(1, a.nbytes))
    return all(
        a[i : i + step].tobytes() == b[i : i + step].tobytes() for i in range(0, len(a), step)
    )


def size(spec: Spec) -> int:
    """Bytes; 0 for a dtype that NumPy does not hold."""
    known = spec.dtype in DTYPES.values()
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize if known else 0


def _carry(to: Side, move: Move, arrays: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    if to == "flax":
        return move.row.to_flax(arrays, move.path_shapes)
    return move.row.to_torch(arrays)


def _carry_back(to: Side, move: Move, arrays: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    return _carry("torch" if to == "flax" else "flax", move, arrays)


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
    table: Table, layout: Layout, shapes: Mapping[str, Shape], to: Side
) -> tuple[list[Move], list[Problem]]:
    if to == "torch":
        return resolve.for_export(layout.groups, shapes)
    steps = {step for r in _rows(layout) for step in r.steps}
    if table.sizes is None and steps & {*SIZED}:
        text = "how many heads there are, and how wide they are, no shape tells"
        hint = "--num-heads and --head-dim, or a config.json beside the checkpoint that has them"
        return [], [Problem("missing", "num_heads, head_dim", text, hint)]
    try:
        paths = layout.shapes(shapes, table.sizes or Sizes(1, 1, 1))
    except TransferError as error:
        return [], error.problems
    return resolve.for_loading(layout.groups, layout.refusals, shapes, paths)


def _targets(
    moves: Iterable[Move], sources: Mapping[str, Spec], to: Side, dtype: str | None
) -> tuple[dict[str, Spec], list[Problem]]:
    """Shape and dtype of what is written; and tensors of several dtypes that become one."""
    made, problems = {}, []
    for move in moves:
        names, before = getattr(move.row, _TO[to]), getattr(move.row, _FROM[to])
        dtypes = {_cast(sources[name].dtype, dtype) for name in before}
        if len(dtypes) > 1:
            text = f"expected one dtype for all of {', '.join(before)}, got {sorted(dtypes)}"
            problems.append(Problem("wrong dtype", before[0], text, "--dtype casts them"))
            continue
        shapes = move.path_shapes if to == "flax" else move.key_shapes
        made |= {n: Spec(s, *dtypes) for n, s in zip(names, shapes, strict=True)}
    return made, problems


def _cast(dtype: str, to: str | None) -> str:
    return to if to is not None and dtype in FLOATS else dtype


def _reached(layout: Layout, keys: Iterable[str]) -> list[str]:
    """The Flax paths of rows whose keys are there, whatever their shapes."""
    keys = list(keys)
    return [p for r in _rows(layout) for b in bindings(r.keys, keys) for p in r.at(b).paths]


def _unused(layout: Layout, used: Iterable[str]) -> list[str]:
    """Flax modules that the table has and of which nothing is there."""
    used = {path.rpartition(".")[0] for path in used}
    modules = dict.fromkeys(path.rpartition(".")[0] for r in _rows(layout) for path in r.paths)
    return [module for module in modules if not bindings([module], used)]


def _steps(move: Move) -> list[str]:
    return [step.name for step in move.row.steps]


def _rows(layout: Layout) -> list[Row]:
    return [r for group in layout.groups for a in group.alternatives for r in a]
