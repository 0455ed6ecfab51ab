"""What names, shapes and types leave open, and the rows that would be possible."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jax_attn.transfer.proposal.folding import PairedRow, folded, folded_row, pattern_of
from jax_attn.transfer.proposal.matching import Fit, Leaf, ModulePair, Steps, TensorModule, turns
from jax_attn.transfer.proposal.naming import Bond
from jax_attn.transfer.table.rows import Row
from jax_attn.transfer.table.step import Shape
from jax_attn.transfer.table.steps import grouped, packed

_PACKED = "packed query, key, value; the order no shape tells"
_SQUARE = "square; transposed or not no shape tells, and no type does"
_AXES = "axes of one size; their order no shape tells"
_TWICE = "its path has another key as good"
_NUMBERS = "the numbers in its name are not those of the Flax side"
_NO_PLACE = "what its module is in Flax has no such parameter"
_NOTHING = "nothing in Flax that is left is both named and shaped like it"
_NO_NAME = "no name tells"
_SEVERAL = "several are named and shaped like it"
_RIVALS = "other keys are named and shaped like it"


@dataclass(frozen=True)
class Candidate:
    """A row that may be right, and why."""

    row: Row
    why: str


@dataclass(frozen=True)
class Undecided:
    """A torch key that no row takes; where its layers are alike, `{layer}` stands for them all."""

    key: str
    shape: Shape
    why: str
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class _Open:
    """One key of one layer; candidates: a possible row, and why."""

    key: str
    part: TensorModule
    shape: Shape
    why: str
    candidates: tuple[tuple[PairedRow, str], ...]


def decided(edges: Iterable[ModulePair]) -> list[PairedRow]:
    """The rows about which there is no doubt, one for each parameter."""
    rows = [
        _row(edge, fit, _ways(edge, fit)[0])
        for edge in edges
        for fit in edge.fits
        if not _doubt(edge, fit)
    ]
    writers = Counter(path for one in rows for path in one.row.paths)
    return [one for one in rows if all(writers[path] == 1 for path in one.row.paths)]


def undecided(
    torch: Iterable[TensorModule],
    keys: Iterable[str],
    found: Iterable[ModulePair],
    chosen: Sequence[ModulePair],
    misnumbered: Sequence[ModulePair],
    rows: Sequence[PairedRow],
    done: Iterable[str],
) -> list[Undecided]:
    """Every key that is not done: why, and what is possible.

    found, chosen, misnumbered: what `edges`, `settled` and `inconsistent` gave. rows: what was
    decided.
    """
    done, written = set(done), {path for one in rows for path in one.row.paths}
    of_part: dict[TensorModule, list[ModulePair]] = {}
    for edge in found:
        of_part.setdefault(edge.torch, []).append(edge)
    settled = {edge.torch: edge for edge in chosen}
    opened = []
    for part in torch:
        for leaf in part.leaves.values():
            (key,), (shape,) = leaf.names, leaf.shapes
            if key in done:
                continue
            if edge := settled.get(part):
                why, candidates = _of_settled(edge, leaf, edge in misnumbered)
            else:
                why, candidates = _of_unsettled(of_part.get(part, ()), leaf, written)
            opened.append(_Open(key, part, shape, why, candidates))
    return _folded(opened, keys)


def _of_settled(
    edge: ModulePair, leaf: Leaf, misnumbered: bool
) -> tuple[str, tuple[tuple[PairedRow, str], ...]]:
    fit = next((fit for fit in edge.fits if fit.source is leaf), None)
    if fit is None:
        return _NO_PLACE, ()
    why = _NUMBERS if misnumbered else _doubt(edge, fit) or _TWICE
    return why, _candidates([(edge, fit)])


def _of_unsettled(
    edges: Iterable[ModulePair], leaf: Leaf, written: set[str]
) -> tuple[str, tuple[tuple[PairedRow, str], ...]]:
    possible = [
        (edge, fit)
        for edge in sorted(edges, key=lambda edge: edge.bond)
        for fit in edge.fits
        if fit.source is leaf and written.isdisjoint(fit.target.names)
    ]
    named = sum(edge.bond < Bond.NONE for edge, _ in possible)
    reasons = (_NO_NAME, _RIVALS, _SEVERAL) if possible else (_NOTHING,)
    return reasons[min(named, 2)], _candidates(possible)


def _doubt(edge: ModulePair, fit: Fit) -> str:
    """Why a settled pair's parameter is no row yet; empty when it is."""
    shape = fit.source.shapes[0]
    sizes = [n for n in shape if n > 1]
    if edge.flax.packs and edge.torch.kind != "attention":
        return _PACKED
    if len(shape) > 2 and len(set(sizes)) < len(sizes):
        return _AXES
    return "" if len(_ways(edge, fit)) == 1 else _SQUARE


def _ways(edge: ModulePair, fit: Fit) -> tuple[Steps, ...]:
    """torch.nn.MultiheadAttention's packing is known."""
    known = edge.flax.packs and edge.torch.kind == "attention"
    return tuple(steps for steps in fit.steps if steps[0] is packed) if known else fit.steps


def _candidates(pairs: Iterable[tuple[ModulePair, Fit]]) -> tuple[tuple[PairedRow, str], ...]:
    return tuple(
        (_row(edge, fit, steps), f"{edge.bond.text}; {_how(steps, fit)}")
        for edge, fit in pairs
        for steps in fit.steps
    )


def _row(edge: ModulePair, fit: Fit, steps: Steps) -> PairedRow:
    return PairedRow(Row(fit.source.names, fit.target.names, steps), edge)


def _how(steps: Steps, fit: Fit) -> str:
    if packed in steps:
        return "one after another"
    if grouped in steps:
        return "head by head"
    if len(fit.source.shapes[0]) < 2:
        return "the shape fits"
    return "transposed" if turns(steps) else "as it lies"


def _folded(opened: Sequence[_Open], keys: Iterable[str]) -> list[Undecided]:
    made = []
    for complete, members in folded(opened, _pattern, keys):
        one = members[0]
        key, shape, why, candidates = _pattern(one)
        if not complete:
            key, candidates = one.key, tuple((found.row, why) for found, why in one.candidates)
        made.append(Undecided(key, shape, why, tuple(Candidate(*c) for c in candidates)))
    return made


def _pattern(one: _Open) -> tuple[str, Shape, str, tuple[tuple[Row, str], ...]]:
    """Equal for what differs in the layer alone."""
    candidates = tuple((folded_row(found), why) for found, why in one.candidates)
    return pattern_of(one.key, one.part.name), one.shape, one.why, candidates
