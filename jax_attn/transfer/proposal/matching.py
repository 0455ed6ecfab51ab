"""Which modules of torch and of Flax are one another's, by their names and shapes together.

A pair is settled when names bind it, shapes allow it, and neither side has a second one as close;
what is settled is out of the way of the rest. Shapes alone settle nothing.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jax_attn.transfer.proposal.naming import Bond, ModuleName, Number, bond, read
from jax_attn.transfer.proposal.naming import aligned as alignments
from jax_attn.transfer.table.rows import Row
from jax_attn.transfer.table.step import MisfitError, Shape, Shapes, Step
from jax_attn.transfer.table.steps import grouped, heads, heads_in, inward, linear, packed

Steps = tuple[Step, ...]


@dataclass(frozen=True, eq=False)
class Leaf:
    """The tensors of one parameter: a torch key, a Flax path, or three paths that torch packs."""

    names: tuple[str, ...]
    shapes: Shapes


@dataclass(frozen=True, eq=False)
class TensorModule:
    """A module: its name, its type where that is known, its parameters by their role."""

    name: ModuleName
    kind: str
    leaves: Mapping[str, Leaf]
    packs: bool = False


class Fit(NamedTuple):
    """A torch parameter, the Flax one that it would become, and every way that its shape allows."""

    source: Leaf
    target: Leaf
    steps: tuple[Steps, ...]


@dataclass(frozen=True, eq=False)
class ModulePair:
    """Two modules that may be one another's."""

    torch: TensorModule
    flax: TensorModule
    bond: Bond
    fits: tuple[Fit, ...]

    @property
    def aligned(self) -> list[tuple[Number, Number]]:
        """The integers that both names have, where there is one way to pair them."""
        ways = alignments(self.torch.name.numbers, self.flax.name.numbers)
        return ways[0] if len(ways) == 1 else []


# torch.nn.MultiheadAttention has these itself, where others have modules.
_OWN = {
    f"{name}_{leaf}": (module, leaf)
    for name, module in (
        ("in_proj", "qkv"),
        ("q_proj", "q_proj"),
        ("k_proj", "k_proj"),
        ("v_proj", "v_proj"),
    )
    for leaf in ("weight", "bias")
}
_LEAVES = {
    "weight": ("kernel", "scale", "embedding", "weight"),
    "gamma": ("scale", "weight"),
    "bias": ("bias",),
    "beta": ("bias",),
    "": ("", "kernel", "scale", "embedding"),
}
_FLAX_LEAVES = ("kernel", "scale", "embedding", "weight", "bias")
_PACKED_PARTS = (("q", "k", "v"), ("k", "v"))

_OTHER: tuple[Steps, ...] = ((), (linear,))
_TRIED: dict[tuple[str, bool], tuple[Steps, ...]] = {  # (Flax parameter, packed) -> ways
    ("kernel", False): ((linear,), (linear, heads), (linear, heads_in), (), (heads,), (heads_in,)),
    ("bias", False): ((), (heads,)),
    ("kernel", True): (
        (packed, linear, heads),
        (grouped, inward),
        (packed, linear),
        (linear, packed, linear, heads),
        (linear, grouped, inward),
        (linear, packed, linear),
    ),
    ("bias", True): ((packed, heads), (grouped,), (packed,)),
}

# (torch type, Flax type) -> whether one's matrix is the other's transposed.
_TURNED = {
    ("linear", "linear"): True,
    ("attention", "linear"): True,
    ("conv1d", "linear"): False,
    ("embedding", "embedding"): False,
}


def torch_parts(shapes: Mapping[str, Shape], kinds: Mapping[str, str]) -> list[TensorModule]:
    """Torch keys by module. kinds: a module's dotted name to "linear", "conv1d", …"""
    found: dict[tuple[str, ...], dict[str, Leaf]] = defaultdict(dict)
    known = {}
    for key, shape in shapes.items():
        *parents, last = key.split(".")
        kind = kinds.get(".".join(parents), "")
        own = _OWN.get(last)
        module, leaf = ((*parents, own[0]), own[1]) if own else (tuple(parents), last)
        if not leaf or leaf not in _LEAVES or leaf in found.get(module, ()):
            # Of what a module holds besides, its type says nothing.
            module, leaf, kind = (*parents, last), "", ""
        found[module][leaf] = Leaf((key,), (shape,))
        known[module] = kind
    return [
        TensorModule(name, known[module], leaves)
        for (module, leaves), name in zip(found.items(), read(found), strict=True)
    ]


def flax_parts(shapes: Mapping[str, Shape], kinds: Mapping[str, str]) -> list[TensorModule]:
    """Flax paths by module, and the query, key and value of one attention once more as packed."""
    found: dict[tuple[str, ...], dict[str, Leaf]] = defaultdict(dict)
    for path, shape in shapes.items():
        *parents, last = path.split(".")
        module, leaf = (tuple(parents), last) if last in _FLAX_LEAVES else ((*parents, last), "")
        found[module][leaf] = Leaf((path,), (shape,))
    packs = _packs(found)
    names = read([*found, *packs])
    single = [
        TensorModule(name, kinds.get(".".join(module), ""), leaves)
        for (module, leaves), name in zip(found.items(), names, strict=False)
    ]
    packed_ones = [
        TensorModule(
            name, kinds.get(".".join(members[0]), ""), _together([found[m] for m in members]), True
        )
        for members, name in zip(packs.values(), names[len(found) :], strict=True)
    ]
    return single + packed_ones


def _packs(modules: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], list[tuple[str, ...]]]:
    """What a packed projection would be called, to the modules that it is split into."""
    families: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = defaultdict(dict)
    modules = list(modules)
    for module, name in zip(modules, read(modules), strict=True):
        if len(name.role) == 1:
            families[module[:-1]][next(iter(name.role))] = module
    return {
        (*parents, "".join(roles)): [family[role] for role in roles]
        for parents, family in families.items()
        for roles in _PACKED_PARTS
        if family.keys() >= set(roles)
    }


def _together(members: Sequence[Mapping[str, Leaf]]) -> dict[str, Leaf]:
    leaves = [leaf for leaf in members[0] if all(leaf in member for member in members)]
    return {
        leaf: Leaf(
            tuple(member[leaf].names[0] for member in members),
            tuple(member[leaf].shapes[0] for member in members),
        )
        for leaf in leaves
    }


def edges(torch: Iterable[TensorModule], flax: Sequence[TensorModule]) -> list[ModulePair]:
    """Every pair that neither names nor shapes rule out."""
    found = []
    for t in torch:
        for f in flax:
            strength = bond(t.name, f.name)
            if strength is None or (f.packs and strength is Bond.NONE):
                continue
            if fits := _fits(t, f):
                found.append(ModulePair(t, f, strength, fits))
    return found


def settled(found: Sequence[ModulePair]) -> list[ModulePair]:
    """The pairs that names and shapes decide."""
    chosen: list[ModulePair] = []
    left = list(found)
    while True:
        bonds: dict[TensorModule, list[Bond]] = defaultdict(list)
        for edge in left:
            bonds[edge.torch].append(edge.bond)
            bonds[edge.flax].append(edge.bond)
        best = [
            edge
            for edge in left
            if edge.bond < Bond.NONE
            and all(_alone(edge.bond, bonds[part]) for part in (edge.torch, edge.flax))
        ]
        if not best:
            return chosen
        chosen += best
        gone = {part for edge in best for part in (edge.torch, edge.flax)}
        left = [edge for edge in left if gone.isdisjoint((edge.torch, edge.flax))]


def _alone(bond: Bond, bonds: Sequence[Bond]) -> bool:
    """Closer than all the others; where names are merely of one kind, without any other."""
    return len(bonds) == 1 if bond is Bond.AKIN else min(bonds) == bond and bonds.count(bond) == 1


def _fits(t: TensorModule, f: TensorModule) -> tuple[Fit, ...]:
    """Of every parameter that both have; none at all when one of them does not fit."""
    fits = []
    for leaf, source in t.leaves.items():
        role = next((name for name in _LEAVES[leaf] if name in f.leaves), None)
        if role is None:
            continue
        steps = _sequences(source, f.leaves[role], role, _TURNED.get((t.kind, f.kind)))
        if not steps:
            return ()
        fits.append(Fit(source, f.leaves[role], steps))
    only_a_bias = "weight" in t.leaves and t.leaves["weight"] not in [fit.source for fit in fits]
    return () if only_a_bias else tuple(fits)


def _sequences(source: Leaf, target: Leaf, leaf: str, turned: bool | None) -> tuple[Steps, ...]:
    """The step sequences that these shapes allow, each of another effect."""
    tried = _TRIED.get((leaf, len(target.names) > 1), _OTHER)
    if turned is not None and leaf != "bias":
        tried = [steps for steps in tried if turns(steps) == turned]
    fitting = [s for s in tried if _fit(source, target, s)]
    if len(fitting) < 2 or len(target.names) > 1:
        return tuple(fitting)
    by_effect = {_effect(source, target, s): s for s in reversed(fitting)}
    return tuple(s for s in fitting if s in by_effect.values())


def turns(steps: Steps) -> bool:
    """Whether (out, in) becomes (in, out): `inward` moves the outputs back, as `linear` does."""
    return sum(step in (linear, inward) for step in steps) % 2 == 1


def _fit(source: Leaf, target: Leaf, steps: Steps) -> bool:
    try:
        return Row(source.names, target.names, steps).key_shapes(target.shapes) == source.shapes
    except MisfitError:
        return False


def _effect(source: Leaf, target: Leaf, steps: Steps) -> tuple[int, ...]:
    """Where each axis comes from: the strides of a view, those of single entries aside."""
    array = np.empty(source.shapes[0], bool)  # never touched
    (view,) = Row(source.names, target.names, steps).to_flax((array,), target.shapes)
    return tuple(stride for stride, n in zip(view.strides, view.shape, strict=True) if n > 1)
