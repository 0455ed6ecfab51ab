"""Compare the weights of both sides, bit for bit, through the transfer table."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Self

from jax_attn.parity.checking.digests import difference
from jax_attn.parity.judge.finding import Finding, StandingNote, findings
from jax_attn.parity.judge.text import joined, quoted
from jax_attn.parity.run.asked_port import AskedWeights
from jax_attn.parity.run.inputs_and_runs import Arrays
from jax_attn.transfer import Layout, TransferError
from jax_attn.transfer.arrays import describe, specs
from jax_attn.transfer.table.resolve import unused
from jax_attn.transfer.table.rows import regex

if TYPE_CHECKING:
    import torch
    from flax import nnx

ToTorch = Callable[[Arrays], Arrays]
"""Arrays by Flax path -> arrays by torch's names, in torch's layout."""


# The largest number of names or patterns in a line.
_SHOWN = 3


@dataclass(frozen=True)
class WeightComparison:
    """The comparison of both sides' weights.

    differences: the differences, with the row of the table. to_torch: None if no table pairs the
    parameters. notes: what was not compared. paired: dotted paths of the port's other Variables
    that the table pairs. passed_over: parameters of the reference that the table passes over.
    """

    differences: tuple[Finding, ...] = ()
    to_torch: ToTorch | None = None
    notes: tuple[Finding, ...] = ()
    paired: frozenset[str] = frozenset()
    passed_over: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Weights:
    """The names and numbers of a reference's weights.

    parameters: the names of its parameters, in torch's order. names: every name of a parameter ->
    the first of that parameter's. buffers: the names of its buffers. state: every tensor of its
    state dict, by name, or `Digests` of them.
    """

    parameters: tuple[str, ...]
    names: Mapping[str, str]
    buffers: frozenset[str]
    state: Mapping[str, Any]

    @classmethod
    def of(cls, module: "torch.nn.Module") -> Self:
        """Read them off a module. Its tensors are not copied."""
        first: dict[int, str] = {}
        every = module.named_parameters(remove_duplicate=False)
        names = {name: first.setdefault(id(parameter), name) for name, parameter in every}
        buffers = frozenset(name for name, _ in module.named_buffers())
        return cls(tuple(first.values()), names, buffers, module.state_dict())


def compare_weights(
    reference: Weights, port: "nnx.Module", layout: Layout | None
) -> WeightComparison:
    """Compare every weight of both sides, bit for bit, through `layout`."""
    from jax_attn.parity.checking.port_weights import HeldWeights  # needs jax

    return compared(reference, None if layout is None else HeldWeights(port, layout))


def compared(reference: Weights, port: AskedWeights | None) -> WeightComparison:
    """Compare every weight of both sides, bit for bit. port: None if no table pairs them."""
    if port is None:
        note = "weights and parameter gradients were not compared: no layout"
        return WeightComparison(notes=(Finding("weights-not-compared", note),))
    layout, arrays = port.layout, port.arrays
    notes: list[Finding] = [*_unused(layout, reference.buffers | reference.state.keys(), arrays)]
    unpaired = "parameter gradients were not compared: the table does not pair them"
    not_paired = (*notes, Finding("gradients-not-paired", unpaired))
    paired = frozenset(arrays.keys() - port.parameters)
    to_torch = _under_own_names(reference, port)
    try:
        ported = to_torch(arrays)
        differentiated: Arrays = {}
        if ported.keys() & reference.buffers:
            differentiated = to_torch({path: arrays[path] for path in arrays.keys() - paired})
    except TransferError as error:
        # A table that does not fit is already a failure, and cannot pair gradients. The problems of
        # a load name the row or the prefix that would fit.
        problems = port.misfits(reference.state) or error.problems
        return WeightComparison(_different(problems), notes=not_paired)
    own = reference.parameters
    over = _passed_over(layout, {*own} - ported.keys())
    missing = [name for name in own if name not in ported and name not in over]
    differences = _different(
        (*_missing(missing, own, layout), *_differences(reference, ported, layout))
    )
    if missing or ported.keys() - reference.buffers - {*own}:
        return WeightComparison(differences, notes=not_paired)
    if over:
        skips = (
            f"the table skips {quoted(sorted(over))} of the reference: neither these "
            "parameters nor their gradients were compared"
        )
        notes.append(Finding("weights-skipped", skips))
    if constants := sorted(differentiated.keys() & reference.buffers):
        line = f"the gradients of {quoted(constants)}, which the port holds as parameters, were"
        line += " not compared: in the reference these are buffers"
        notes.append(StandingNote("buffer-gradient", line))
    return WeightComparison(differences, to_torch, tuple(notes), paired, frozenset(over))


def _different(problems: Iterable[object]) -> tuple[Finding, ...]:
    return findings("weights-differ", (f"weights: {problem}" for problem in problems))


def _under_own_names(reference: Weights, port: AskedWeights) -> ToTorch:
    """Return `port.to_torch` with torch's own names of the parameters.

    If a parameter has several names, torch uses the first in the order of the modules. The table
    may have its row under another name, to which it ties the first.
    """
    own = {
        name: first
        for name, first in reference.names.items()
        if any(t.same_as == name and regex(t.key).fullmatch(first) for t in port.layout.passed_over)
    }

    def to_torch(arrays: Arrays) -> Arrays:
        return {own.get(name, name): array for name, array in port.to_torch(arrays).items()}

    return to_torch


def _of_row(name: str, layout: Layout) -> str:
    """Return the name under which the table has a row for a parameter."""
    ties = (t for t in layout.passed_over if t.same_as and regex(t.key).fullmatch(name))
    return next((t.same_as for t in ties), name)


def _unused(layout: Layout, keys: Iterable[str], paths: Iterable[str]) -> Iterator[Finding]:
    """Yield a note on the rows that match nothing, as after a spelling mistake on both sides."""
    if rows := [str(r) for r in unused(layout.groups, keys, paths)]:
        names = joined([*rows[:_SHOWN], *([f"{len(rows) - _SHOWN} more"] if rows[_SHOWN:] else [])])
        yield StandingNote("row-unused", f"nothing on either side matches the table's {names}")


def _passed_over(layout: Layout, names: Collection[str]) -> set[str]:
    """Return the names that the table ignores, without tied keys."""
    patterns = [regex(item.key) for item in layout.passed_over if not item.same_as]
    return {name for name in names if any(pattern.fullmatch(name) for pattern in patterns)}


def _missing(names: Sequence[str], own: Collection[str], layout: Layout) -> Iterator[str]:
    """Yield a line on parameters that the port lacks, and one on those without a row in the table.

    The second also shows the rows that would ignore them.
    """
    rows = [regex(key) for key in layout.torch_keys()]
    with_row = [name for name in names if any(row.fullmatch(name) for row in rows)]
    if with_row:
        yield f"the reference has {quoted(with_row, _SHOWN)}, but the port has no counterpart"
    if not (missing := [name for name in names if name not in with_row]):
        return
    patterns: dict[str, None] = {}
    for name in missing:
        pattern = _in_every_layer(name)
        every = {other for other in own if regex(pattern).fullmatch(other)}
        patterns[pattern if every <= {*missing} else name] = None
    items = [f'ignored("{pattern}", "why")' for pattern in patterns]
    shown = [*items[:_SHOWN], *([f"{len(items) - _SHOWN} more"] if items[_SHOWN:] else [])]
    yield (
        f"the reference's {quoted(missing, _SHOWN)} {'are' if missing[1:] else 'is'} in no row of "
        f"the table: add rows, or skip {'them' if missing[1:] else 'it'} with {joined(shown)}"
    )


def _in_every_layer(name: str) -> str:
    """Replace the numbers in a name: "layers.3.up.weight" -> "layers.{i}.up.weight"."""
    holes = (f"{{{letter}}}" for letter in "ijklmnop")
    return ".".join(next(holes) if part.isdigit() else part for part in name.split("."))


def _differences(reference: Weights, ported: Arrays, layout: Layout) -> Iterator[str]:
    """Yield a line for each weight that differs.

    ported: the port's weights under torch's names.
    """
    weights, (wanted, unreadable) = reference.state, specs(reference.state)
    if unreadable:
        raise TransferError("comparing weights", unreadable)
    untied = {*reference.parameters, *reference.buffers}
    for name in ported:
        if name in weights and name not in untied:
            yield f"the reference ties {name!r} to another parameter, but the table does not"
    for name, got in ported.items():
        if name not in weights:
            nearest = [repr(near) for near in get_close_matches(name, weights, n=3)]
            like = f"; nearest: {', '.join(nearest)}" if nearest else ""
            yield f"the table gives {name!r}, which the reference lacks{like}"
        elif (want := wanted[name]) != (here := describe(got)):
            yield f"{name!r} is {want} in the reference, {here} in the port"
        elif how := difference(weights[name], got):
            yield f"{name!r} differs {how}; its row is {layout.row_of(_of_row(name, layout))}"
