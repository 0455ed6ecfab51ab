"""Keys that names, shapes and types do not decide, with the possible rows for them."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from jax_attn.transfer.proposal.folding import LayerItem, folded, pattern_of, rows_of
from jax_attn.transfer.proposal.matching import (
    KNOWN_STEPS,
    Fit,
    ModulePair,
    Steps,
    TensorModule,
    turns,
)
from jax_attn.transfer.proposal.naming import Bond
from jax_attn.transfer.table.rows import Row, bindings
from jax_attn.transfer.table.steps import Shape, conv, grouped, packed

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
    """A row that may be right, with the reason."""

    row: Row
    why: str


@dataclass(frozen=True)
class Undecided:
    """A torch key that no row takes; `{layer}` in it stands for layers that are all alike."""

    key: str
    shape: Shape
    why: str
    candidates: tuple[Candidate, ...]


def is_certain(torch: TensorModule, flax: TensorModule, fit: Fit) -> bool:
    """Return whether shapes and types leave one way to carry a parameter."""
    return not _doubt(ModulePair(torch, flax, Bond.NONE, (fit,)), fit)


def decided(pairs: Iterable[ModulePair]) -> list[LayerItem[Row]]:
    """Return the rows that are beyond doubt, one for each parameter."""
    rows = [
        rows_of(pair, fit, _ways(pair, fit)[0])
        for pair in pairs
        for fit in pair.fits
        if not _doubt(pair, fit)
    ]
    writers = Counter(path for r, _ in rows for path in r.paths)
    return [one for one in rows if all(writers[path] == 1 for path in one.own.paths)]


def undecided(
    torch: Iterable[TensorModule],
    keys: Collection[str],
    possible: Iterable[ModulePair],
    settled: Iterable[ModulePair],
    odd: Sequence[ModulePair],
    rows: Iterable[LayerItem[Row]],
    done: Iterable[str],
) -> list[Undecided]:
    """Return every key that is not done, with the reason and the possible rows.

    possible, settled, odd: from `possible_pairs`, `settled_pairs` and `misnumbered`. rows: those
    that are decided.
    """
    done, written = set(done), {path for r, _ in rows for path in r.paths}
    pairs_of: dict[TensorModule, list[ModulePair]] = defaultdict(list)
    for pair in possible:
        pairs_of[pair.torch].append(pair)
    settled_of = {pair.torch: pair for pair in settled}
    leaves = [(module, leaf) for module in torch for leaf in module.leaves.values()]
    opened = []
    for module, leaf in leaves:
        (key,), (shape,) = leaf.names, leaf.shapes
        if key in done:
            continue
        if own := settled_of.get(module):
            fits = [(own, fit) for fit in own.fits if fit.source is leaf]
            why = _NO_PLACE
            if fits:
                why = _NUMBERS if own in odd else _doubt(*fits[0]) or _TWICE
        else:
            fits = [
                (pair, fit)
                for pair in sorted(pairs_of[module], key=lambda pair: pair.bond)
                for fit in pair.fits
                if fit.source is leaf and written.isdisjoint(fit.target.names)
            ]
            named = sum(pair.bond < Bond.NONE for pair, _ in fits)
            why = (_NO_NAME, _RIVALS, _SEVERAL)[min(named, 2)] if fits else _NOTHING
        candidates = [
            (rows_of(pair, fit, steps), f"{pair.bond.text}; {_how(steps, fit)}")
            for pair, fit in fits
            for steps in fit.steps
        ]
        of_layer = tuple(Candidate(both.own, text) for both, text in candidates)
        of_all = tuple(Candidate(both.pattern, text) for both, text in candidates)
        pattern = Undecided(pattern_of(key, module.name), shape, why, of_all)
        opened.append(LayerItem(Undecided(key, shape, why, of_layer), pattern))
    return folded(opened, lambda one, count: len(bindings([one.key], keys)) == count)


def _doubt(pair: ModulePair, fit: Fit) -> str:
    """Say why a settled pair's parameter is not decided; empty if it is."""
    shape = fit.source.shapes[0]
    sizes = [n for n in shape if n > 1]
    if pair.flax.packs and pair.torch.kind != "attention":
        return _PACKED
    is_known = (pair.torch.kind, pair.flax.kind) in KNOWN_STEPS
    if len(shape) > 2 and len(set(sizes)) < len(sizes) and not is_known:
        return _AXES
    return "" if len(_ways(pair, fit)) == 1 else _SQUARE


def _ways(pair: ModulePair, fit: Fit) -> tuple[Steps, ...]:
    """Return the possible steps; torch.nn.MultiheadAttention's packing is known."""
    known = pair.flax.packs and pair.torch.kind == "attention"
    return tuple(steps for steps in fit.steps if steps[0] is packed) if known else fit.steps


def _how(steps: Steps, fit: Fit) -> str:
    if packed in steps:
        return "query, key, value in sequence"
    if grouped in steps:
        return "head by head"
    if conv in steps:
        return "as a convolution's"
    if len(fit.source.shapes[0]) < 2:
        return "the shape fits"
    return "transposed" if turns(steps) else "not transposed"
