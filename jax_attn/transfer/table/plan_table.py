"""A plan's moves as text: one line for each, or one for all layers that are alike."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from jax_attn.transfer.problems import grid, printable
from jax_attn.transfer.table.resolve import Move

Cells = tuple[str, ...]

_HEAD = ("torch", "shape", "flax", "shape", "dtype", "steps")
_NUMBER = re.compile(r"(?<![^.])(0|[1-9]\d*)(?![^.])")
"""A part of a dotted name that is an integer."""
_OPEN, _ITS = "{}", "{one}"


def printed(moves: Iterable[Move], dtype: Callable[[Move], str]) -> str:
    """Format both sides' names and shapes, dtype and steps.

    Lines that differ only in the layer's number become one: layers.{0..31}.mlp.up.kernel. So do the
    names of a row that differ in one number, such as the matrices of its experts.
    """
    layers: dict[Cells, list[str]] = {}
    for move in moves:
        cells, number = _line(move, dtype(move))
        layers.setdefault(cells, []).append(number)
    return grid(_HEAD, (_closed(cells, numbers) for cells, numbers in layers.items()))


def passed_over_lines(passed_over: Mapping[str, str]) -> list[str]:
    """Return a line for each name that is not carried, with the reason."""
    return [printable(f"{name}: skipped: {why}") for name, why in passed_over.items()]


def _line(move: Move, dtype: str) -> tuple[Cells, str]:
    """Return a move's cells with its layer's number left open, and the number, '' without one."""
    names = (*move.row.keys, *move.row.paths)
    numbers = {match[0] if (match := _NUMBER.search(name)) else "" for name in names}
    number = numbers.pop() if len(numbers) == 1 else ""
    cells: list[str] = []
    for side, shapes in ((move.row.keys, move.key_shapes), (move.row.paths, move.path_shapes)):
        opened = (_NUMBER.sub(_OPEN, name, count=1) if number else name for name in side)
        cells += _side([*opened], [str([*shape]) for shape in shapes])
    return (*cells, dtype, move.row.effect), number


def _side(names: Sequence[str], shapes: Sequence[str]) -> Cells:
    """Return one cell for a row's names, and one for their shapes."""
    numbers = [int(match[0]) for name in names if (match := _NUMBER.search(name))]
    opened = {_NUMBER.sub(_ITS, name, count=1) for name in names}
    is_run = len(numbers) == len(names) > 1 and numbers == sorted(set(numbers))
    if is_run and len(opened) == 1 == len(set(shapes)):
        (name,) = opened
        return printable(name).replace(_ITS, _runs(numbers)), f"{len(names)} of {shapes[0]}"
    return printable(", ".join(names)), ", ".join(shapes)


def _closed(cells: Cells, numbers: Sequence[str]) -> Cells:
    """Return the cells with the numbers of all layers that they represent."""
    if numbers == [""]:
        return cells
    keys, before, paths, *rest = cells
    every = _runs(sorted(map(int, numbers)))
    return keys.replace(_OPEN, every), before, paths.replace(_OPEN, every), *rest


def _runs(numbers: Sequence[int]) -> str:
    """Format sorted numbers: "3" for one; "{0..5,7}" for several."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}..{r[-1]}" for r in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"
