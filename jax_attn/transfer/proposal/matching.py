"""Matching of torch and Flax modules, by names and shapes together.

A pair is settled if its names agree, its shapes fit, and neither module has another partner as
close; settled modules are no longer candidates for others. Shapes alone settle nothing.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from jax_attn.transfer.proposal.naming import Bond, ModuleName, Number, bond, read, spelled
from jax_attn.transfer.proposal.naming import aligned as alignments
from jax_attn.transfer.table.rows import Row
from jax_attn.transfer.table.stacks import conv_bias, linears
from jax_attn.transfer.table.steps import (
    Shape,
    Shapes,
    Step,
    conv,
    grouped,
    heads,
    heads_in,
    inward,
    linear,
    packed,
    squeezed,
)

Steps = tuple[Step, ...]


@dataclass(frozen=True, eq=False)
class Leaf:
    """Tensors of one parameter: a torch key, a Flax path, or three paths that torch packs."""

    names: tuple[str, ...]
    shapes: Shapes


@dataclass(frozen=True, eq=False)
class TensorModule:
    """A module: its name, its type if known, its parameters by role."""

    name: ModuleName
    kind: str
    leaves: Mapping[str, Leaf]
    packs: bool = False


class Fit(NamedTuple):
    """A torch parameter, a possible Flax counterpart, and all steps that the shapes allow."""

    source: Leaf
    target: Leaf
    steps: tuple[Steps, ...]


@dataclass(frozen=True, eq=False)
class ModulePair:
    """Two modules that may correspond."""

    torch: TensorModule
    flax: TensorModule
    bond: Bond
    fits: tuple[Fit, ...]

    @property
    def aligned(self) -> list[tuple[Number, Number]]:
        """Pairs of integers that both names have, if there is only one way to pair them."""
        ways = alignments(self.torch.name.numbers, self.flax.name.numbers)
        return ways[0] if len(ways) == 1 else []


# Parameters of torch.nn.MultiheadAttention itself, for which other designs have modules.
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
    "weight": ("kernel", "scale", "embedding", "weight", "gamma", "embeddings", "w"),
    "gamma": ("scale", "weight", "gamma"),
    "bias": ("bias", "beta", "b"),
    "beta": ("bias", "beta", "b"),
    "": ("", "kernel", "scale", "embedding"),
}
_FLAX_LEAVES = tuple(dict.fromkeys(name for names in _LEAVES.values() for name in names if name))
_BIASES = ("bias", "beta", "b")
_SHORT = {"w", "b"}
"""Names of a weight and a bias that are read so only if both are there."""
_PACKED_PARTS = (("q", "k", "v"), ("k", "v"))

_OTHER: tuple[Steps, ...] = ((), (linear,), (squeezed, heads), (conv,), (linears,), (conv_bias,))
_SEQUENCES: dict[tuple[str, bool], tuple[Steps, ...]] = {  # (Flax parameter, packed) -> ways
    ("kernel", False): (
        *((linear,), (linear, heads), (linear, heads_in), (), (heads,), (heads_in,)),
        *((conv,), (linears,)),
    ),
    ("bias", False): ((), (conv_bias,), (heads,)),
    ("weight", True): ((packed,),),
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

# (torch type, Flax type) -> whether one's matrix is the transpose of the other's.
_TURNED = {
    ("linear", "linear"): True,
    ("attention", "linear"): True,
    ("conv1d", "linear"): False,
    ("embedding", "embedding"): False,
    ("linear", "linear as torch"): False,
    ("attention", "linear as torch"): False,
    ("conv1d", "linear as torch"): True,
}
# (torch type, Flax type) -> the only steps of their kernels.
KNOWN_STEPS: dict[tuple[str, str], Steps] = {
    ("conv", "conv"): (conv,),
    ("conv", "conv as torch"): (),
}


def torch_modules(shapes: Mapping[str, Shape], kinds: Mapping[str, str]) -> list[TensorModule]:
    """Group torch keys by module. kinds: a module's dotted name to "linear", "conv1d", …"""
    leaves_of: dict[tuple[str, ...], dict[str, Leaf]] = defaultdict(dict)
    kind_of = {}
    for key, shape in shapes.items():
        *parents, last = key.split(".")
        kind = kinds.get(".".join(parents), "")
        own = _OWN.get(last)
        module, leaf = ((*parents, own[0]), own[1]) if own else (tuple(parents), last)
        if not leaf or leaf not in _LEAVES or leaf in leaves_of.get(module, ()):
            # A module's type does not describe its other parameters.
            module, leaf, kind = (*parents, last), "", ""
        leaves_of[module][leaf] = Leaf((key,), (shape,))
        kind_of[module] = kind
    return [
        TensorModule(name, kind_of[module], leaves)
        for (module, leaves), name in zip(leaves_of.items(), read(leaves_of), strict=True)
    ]


def flax_modules(shapes: Mapping[str, Shape], kinds: Mapping[str, str]) -> list[TensorModule]:
    """Group Flax paths by module; add attention's query, key and value as one packed module."""
    leaves_of: dict[tuple[str, ...], dict[str, Leaf]] = defaultdict(dict)
    siblings: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for *parents, last in (path.split(".") for path in shapes):
        siblings[*parents,].add(last)
    for path, shape in shapes.items():
        *parents, last = path.split(".")
        is_leaf = last in _FLAX_LEAVES and (last not in _SHORT or siblings[*parents,] >= _SHORT)
        module, leaf = (tuple(parents), last) if is_leaf else ((*parents, last), "")
        leaves_of[module][leaf] = Leaf((path,), (shape,))
    packs = _packs(leaves_of)
    names = read([*leaves_of, *packs])
    single = [
        TensorModule(name, kinds.get(".".join(module), ""), leaves)
        for (module, leaves), name in zip(leaves_of.items(), names, strict=False)
    ]
    together = [
        TensorModule(
            name,
            kinds.get(".".join(members[0]), ""),
            _together([leaves_of[module] for module in members]),
            packs=True,
        )
        for members, name in zip(packs.values(), names[len(leaves_of) :], strict=True)
    ]
    return single + together


def _packs(modules: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], list[tuple[str, ...]]]:
    """Map the name of each possible packed projection to the modules that it combines."""
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


def possible_pairs(torch: Iterable[TensorModule], flax: Sequence[TensorModule]) -> list[ModulePair]:
    """Return every pair that neither names nor shapes rule out."""
    pairs = []
    for t, f in product(torch, flax):
        strength = bond(t.name, f.name)
        if strength is None or (f.packs and strength is Bond.NONE):
            continue
        if fits := _fits(t, f):
            pairs.append(ModulePair(t, f, strength, fits))
    return pairs


def settled_pairs(possible: Iterable[ModulePair]) -> list[ModulePair]:
    """Return the pairs that names and shapes decide."""
    settled: list[ModulePair] = []
    left = list(possible)
    while True:
        bonds: dict[TensorModule, list[Bond]] = defaultdict(list)
        for pair in left:
            bonds[pair.torch].append(pair.bond)
            bonds[pair.flax].append(pair.bond)
        best = [
            pair
            for pair in left
            if pair.bond < Bond.NONE
            and all(_alone(pair.bond, bonds[module]) for module in (pair.torch, pair.flax))
        ]
        if not best:
            return settled
        settled += best
        gone = {module for pair in best for module in (pair.torch, pair.flax)}
        left = [pair for pair in left if gone.isdisjoint((pair.torch, pair.flax))]


def _alone(bond: Bond, bonds: Sequence[Bond]) -> bool:
    """Return whether a bond is closer than all others; an AKIN bond must be the only one."""
    return len(bonds) == 1 if bond is Bond.AKIN else min(bonds) == bond and bonds.count(bond) == 1


def _fits(t: TensorModule, f: TensorModule) -> tuple[Fit, ...]:
    """Return the fits of every parameter that both have; () if one of them does not fit."""
    fits = []
    for leaf, source in t.leaves.items():
        role = next((name for name in _LEAVES[leaf] if name in f.leaves), None)
        if role is None:
            continue
        steps = _sequences(source, f.leaves[role], role, (t.kind, f.kind))
        if not steps:
            return ()
        fits.append(Fit(source, f.leaves[role], steps))
    only_a_bias = "weight" in t.leaves and t.leaves["weight"] not in [fit.source for fit in fits]
    return () if only_a_bias else tuple(fits)


def fit_of(t: TensorModule, source: Leaf, f: TensorModule, target: Leaf) -> Fit | None:
    """Return the fit of two parameters, whatever their names; None if no steps fit."""
    role = next(role for role, leaf in f.leaves.items() if leaf is target)
    is_bias = source is t.leaves.get("bias")
    if is_bias != (role in _BIASES) and "" not in (role, *t.leaves):
        return None
    steps = _sequences(source, target, role, (t.kind, f.kind))
    return Fit(source, target, steps) if steps else None


def differ_as_biases(pair: ModulePair) -> bool:
    """Return whether one parameter of the pair's only fit is a bias and the other is not.

    A bare parameter is a bias if a word of its name says so.
    """
    (fit,) = pair.fits
    return _is_bias(pair.torch, fit.source) != _is_bias(pair.flax, fit.target)


def _is_bias(module: TensorModule, leaf: Leaf) -> bool:
    role = next(role for role, own in module.leaves.items() if own is leaf)
    words = {role} if role else spelled(module.name.tokens[-1])
    return not words.isdisjoint(_BIASES)


def _sequences(source: Leaf, target: Leaf, leaf: str, kinds: tuple[str, str]) -> tuple[Steps, ...]:
    """Return the step sequences that these shapes allow, one for each effect.

    kinds: the types of the torch module and of the Flax module.
    """
    is_bias = leaf in _BIASES
    turned, known = (None, None) if is_bias else (_TURNED.get(kinds), KNOWN_STEPS.get(kinds))
    fitting = [
        steps
        for steps in _SEQUENCES.get(("bias" if is_bias else leaf, len(target.names) > 1), _OTHER)
        if (turned is None or turns(steps) == turned)
        and (known is None or steps == known)
        and Row(source.names, target.names, steps).fits(target.shapes) == source.shapes
    ]
    if len(fitting) < 2 or len(target.names) > 1:
        return tuple(fitting)
    by_effect = {_effect(source, target, s): s for s in reversed(fitting)}
    return tuple(s for s in fitting if s in by_effect.values())


def turns(steps: Steps) -> bool:
    """Return whether (out, in) becomes (in, out): `inward` moves outputs back, as `linear` does."""
    return sum(step in (linear, linears, inward) for step in steps) % 2 == 1


def _effect(source: Leaf, target: Leaf, steps: Steps) -> tuple[int, ...]:
    """Return where each axis comes from: the strides of a view, without axes of size 1."""
    array = np.empty(source.shapes[0], bool)  # never touched
    (view,) = Row(source.names, target.names, steps).to_flax((array,), target.shapes)
    return tuple(stride for stride, n in zip(view.strides, view.shape, strict=True) if n > 1)
