"""Keys that names, shapes and types leave open, and the rows that are possible for them."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jax_attn.transfer.proposal.folding import PairedRow, folded, folded_row, pattern_of
from jax_attn.transfer.proposal.matching import Fit, Leaf, ModulePair, Steps, TensorModule, turns
from jax_attn.transfer.proposal.naming import Bond
from jax_attn.transfer.table.rows import Row
from jax_attn.transfer.table.steps import Shape, grouped, packed

_PACKED = "packed query, key, value; shapes do not determine their order"
_SQUARE = "square; neither its shape nor a type determines whether it is transposed"
_AXES = "axes of one size; shapes do not determine their order"
_TWICE = "another key fits its path as well"
_NUMBERS = "the numbers in its name differ from those of the Flax side"
_NO_PLACE = "the module's counterpart in Flax has no such parameter"
_NOTHING = "no remaining Flax parameter matches its name and shape"
_NO_NAME = "no name matches"
_SEVERAL = "several match its name and shape"
_RIVALS = "other keys match the same name and shape"


@dataclass(frozen=True)
class Candidate:
    """A row that may be right, and why."""

    row: Row
    why: str


@dataclass(frozen=True)
class Undecided:
    """A torch key that no row takes; `{layer}` in it stands for layers that are all alike."""

    key: str
    shape: Shape
    why: str
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class _Open:
    """One key of one layer; candidates: a possible row, and why."""

    key: str
    module: TensorModule
    shape: Shape
    why: str
    candidates: tuple[tuple[PairedRow, str], ...]


def decided(pairs: Iterable[ModulePair]) -> list[PairedRow]:
    """The rows without doubt, one for each parameter."""
    rows = [
        _row(pair, fit, _ways(pair, fit)[0])
        for pair in pairs
        for fit in pair.fits
        if not _doubt(pair, fit)
    ]
    writers = Counter(path for one in rows for path in one.row.paths)
    return [one for one in rows if all(writers[path] == 1 for path in one.row.paths)]


def undecided(
    torch: Iterable[TensorModule],
    keys: Iterable[str],
    possible: Iterable[ModulePair],
    settled: Iterable[ModulePair],
    odd: Sequence[ModulePair],
    rows: Iterable[PairedRow],
    done: Iterable[str],
) -> list[Undecided]:
    """Every key that is not done, why, and the rows that are possible.

    possible, settled, odd: of `possible_pairs`, `settled_pairs` and `misnumbered`. rows: those
    that are decided.
    """
    done, written = set(done), {path for one in rows for path in one.row.paths}
    pairs_of: dict[TensorModule, list[ModulePair]] = defaultdict(list)
    for pair in possible:
        pairs_of[pair.torch].append(pair)
    settled_of = {pair.torch: pair for pair in settled}
    opened = []
    for module in torch:
        for leaf in module.leaves.values():
            (key,), (shape,) = leaf.names, leaf.shapes
            if key in done:
                continue
            if module in settled_of:
                own = settled_of[module]
                why, candidates = _of_settled(own, leaf, own in odd)
            else:
                why, candidates = _of_unsettled(pairs_of[module], leaf, written)
            opened.append(_Open(key, module, shape, why, candidates))
    return _folded(opened, keys)


def _of_settled(
    pair: ModulePair, leaf: Leaf, misnumbered: bool
) -> tuple[str, tuple[tuple[PairedRow, str], ...]]:
    fit = next((fit for fit in pair.fits if fit.source is leaf), None)
    if fit is None:
        return _NO_PLACE, ()
    why = _NUMBERS if misnumbered else _doubt(pair, fit) or _TWICE
    return why, _candidates([(pair, fit)])


def _of_unsettled(
    pairs: Iterable[ModulePair], leaf: Leaf, written: set[str]
) -> tuple[str, tuple[tuple[PairedRow, str], ...]]:
    possible = [
        (pair, fit)
        for pair in sorted(pairs, key=lambda pair: pair.bond)
        for fit in pair.fits
        if fit.source is leaf and written.isdisjoint(fit.target.names)
    ]
    named = sum(pair.bond < Bond.NONE for pair, _ in possible)
    reasons = (_NO_NAME, _RIVALS, _SEVERAL) if possible else (_NOTHING,)
    return reasons[min(named, 2)], _candidates(possible)


def _doubt(pair: ModulePair, fit: Fit) -> str:
    """Why a settled pair's parameter is not decided; empty when it is."""
    shape = fit.source.shapes[0]
    sizes = [n for n in shape if n > 1]
    if pair.flax.packs and pair.torch.kind != "attention":
        return _PACKED
    if len(shape) > 2 and len(set(sizes)) < len(sizes):
        return _AXES
    return "" if len(_ways(pair, fit)) == 1 else _SQUARE


def _ways(pair: ModulePair, fit: Fit) -> tuple[Steps, ...]:
    """The steps that are possible; torch.nn.MultiheadAttention's packing is known."""
    known = pair.flax.packs and pair.torch.kind == "attention"
    return tuple(steps for steps in fit.steps if steps[0] is packed) if known else fit.steps


def _candidates(fits: Iterable[tuple[ModulePair, Fit]]) -> tuple[tuple[PairedRow, str], ...]:
    return tuple(
        (_row(pair, fit, steps), f"{pair.bond.text}; {_how(steps, fit)}")
        for pair, fit in fits
        for steps in fit.steps
    )


def _row(pair: ModulePair, fit: Fit, steps: Steps) -> PairedRow:
    return PairedRow(Row(fit.source.names, fit.target.names, steps), pair)


def _how(steps: Steps, fit: Fit) -> str:
    if packed in steps:
        return "one after another"
    if grouped in steps:
        return "head by head"
    if len(fit.source.shapes[0]) < 2:
        return "the shape fits"
    return "transposed" if turns(steps) else "as it lies"


def _folded(opened: Sequence[_Open], keys: Iterable[str]) -> list[Undecided]:
    undecided_keys = []
    for complete, members in folded(opened, _pattern, keys):
        one = members[0]
        key, (shape, why, candidates) = _pattern(one)
        if not complete:
            key, candidates = one.key, tuple((paired.row, why) for paired, why in one.candidates)
        undecided_keys.append(Undecided(key, shape, why, tuple(Candidate(*c) for c in candidates)))
    return undecided_keys


def _pattern(one: _Open) -> tuple[str, tuple[Shape, str, tuple[tuple[Row, str], ...]]]:
    """Equal for keys that differ only in the layer."""
    candidates = tuple((folded_row(paired), why) for paired, why in one.candidates)
    return pattern_of(one.key, one.module.name), (one.shape, one.why, candidates)
