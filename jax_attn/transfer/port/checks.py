"""What can be wrong with a port beyond its table: each check gives the problems it finds.

A table without a module to fill cannot know what should be there; layers that are not alike,
attention that is not whole and parts that its family always has show that something is not.
Needs no framework.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from typing import Any

from jax_attn.transfer.families import Place, Traits
from jax_attn.transfer.families.config import DECODER_LAYERS, LAYERS, Reading
from jax_attn.transfer.problems import Problem, nearest
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.resolve import Move
from jax_attn.transfer.table.rows import Row, bindings, holes, regex
from jax_attn.transfer.table.step import HeadSizes, Shape
from jax_attn.transfer.table.steps import grouped, heads, heads_in, packed

SIZED = (heads, heads_in, grouped, packed)
"""Steps that no shape of flat projections tells how to take."""

_NAMED = 8
"""Missing layers that a message names."""

_TRIOS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))
_HEADS = {"q_proj": "num_heads", "out_proj": "num_heads"}
_HEADS |= dict.fromkeys(("k_proj", "v_proj"), "num_kv_heads")
_BIAS = ("position_bias", "embedding")  # one layer learns it, the others may borrow it
_BARE = ("classifier",)  # of sequences it has no bias in decoders, of tokens it has
_FIRST_HOLE = re.compile(r"\{(\w+)\}")


def uneven(layout: Layout, names: Iterable[str], side: str) -> list[Problem]:
    """Layers of which one has what another lacks, and layers missing in between.

    names: those that are there; side: "keys" or "paths", of which side they are.
    """
    names = list(names)
    had: dict[str, dict[str, set[int]]] = defaultdict(dict)  # stem -> a pattern -> its layers
    for group in layout.groups:
        borrowed = any(_BIAS[0] in path.split(".") for r in group.rows for path in r.paths)
        if len(holes(group.rows[0])) != 1 or borrowed:
            continue
        by_pattern = {n: bindings([n], names) for r in group.rows for n in getattr(r, side)}
        if met := [name for name, found in by_pattern.items() if found]:
            layers = {int(value) for name in met for ((_, value),) in by_pattern[name]}
            had[met[0].partition("{")[0]][met[0]] = layers
    strays, problems = _strays(layout, names), []
    for stem, patterns in had.items():
        layers = set().union(*patterns.values())
        if gaps := _gaps(layers, max(layers) + 1):
            text = f"expected layers 0 to {max(layers)}, nothing is there of {gaps}"
            problems.append(Problem("missing", f"{stem}{gaps[0]}", text))
        for pattern, found in patterns.items():
            for layer in sorted(layers - found):
                text = f"layer {layer} lacks it, {len(found)} of {len(layers)} layers have it"
                key = _at(pattern, layer)
                problems.append(Problem("missing", key, text, nearest(key, strays)))
    return problems


def missing_parts(
    layout: Layout,
    beside: tuple[Layout, Set[str]],
    blocks: Iterable[Place],
    names: Iterable[str],
    side: str,
) -> list[Problem]:
    """Kernels, scales, biases and embeddings beside the blocks of which nothing is there.

    layout: the whole table; beside: that of all but the blocks, and the Flax parts of it that may
    be absent; a bias stands where its kernel or scale does. What only some of the layers lack is
    `uneven`. names, side: as there.
    """
    (table, optional), names, places = beside, list(names), [place.flax for place in blocks]
    # A block that is there has its norm; a side that has no block, a T5's decoder, has nothing.
    optional = optional - {f"{place.rpartition('.')[2]}_norm" for place in places}
    sides = {path.split(".")[0] for path in table.flax_paths() if _FIRST_HOLE.search(path)}
    optional |= sides - {place.split(".")[0] for place in places}
    there = {
        path
        for group in table.groups
        for r in group.rows
        if bindings(getattr(r, side), names)
        for path in r.paths
    }
    strays, problems = _strays(layout, names), []
    for group in table.groups:
        first = group.rows[0]
        module, _, leaf = first.paths[0].rpartition(".")
        may_lack = not optional.isdisjoint(first.paths[0].split("."))
        found = any(path in there for r in group.rows for path in r.paths)
        if leaf == "bias":
            may_lack = module in _BARE or not _weighs(module, table) & there
        elif may_lack:
            may_lack = f"{module}.bias" not in there
        if found or may_lack:
            continue
        text = "expected, as every model of its family has it"
        text = "expected in every layer, none has it" if holes(first) else text
        if leaf == "kernel" and module == "lm_head":
            text = "expected, as architectures in config.json names one with a head, not tied"
        name, *others = dict.fromkeys(
            _at(getattr(rows[0], side)[0], 0) for rows in group.alternatives
        )
        text += f"; {' or '.join(others)} would do instead" if others else ""
        problems.append(Problem("missing", name, text, nearest(name, strays)))
    return problems


def incomplete(blocks: Iterable[tuple[Place, Traits]], paths: Iterable[str]) -> list[Problem]:
    """What an attention block of these traits needs and lacks, or has and has no place for."""
    paths = set(paths)
    problems = []
    for place, traits in blocks:
        needed, optional = {f"{part}.kernel" for part in _HEADS}, {"q_norm.bias", "k_norm.bias"}
        needed |= {f"{part}.bias" for part in _TRIOS[0] if traits.use_bias}
        needed |= {"out_proj.bias"} if traits.use_out_bias else set()
        needed |= {"q_norm.scale", "k_norm.scale"} if traits.qk_norm else set()
        learnt = traits.bias is not None and traits.bias.kind == "relative" and not traits.lender
        needed |= {".".join(_BIAS)} if learnt else set()
        possible = {f"{part}.{leaf}" for part in _HEADS for leaf in ("kernel", "bias")}
        possible |= {"q_norm.scale", "k_norm.scale", ".".join(_BIAS)} | optional
        found = {name for name in possible if f"{place.flax}.{name}" in paths}
        for name in sorted(needed - found):
            text = f"expected in the attention at {place.torch!r}, as the config has it"
            problems.append(Problem("missing", f"{place.flax}.{name}", text))
        for name in sorted(found - needed - (optional if traits.qk_norm else set())):
            text = f"the attention at {place.torch!r} has none, as the config has it"
            problems.append(Problem("unexpected", f"{place.flax}.{name}", text))
    return problems


def some_biases(paths: Iterable[str]) -> list[Problem]:
    """Of query, key and value, a bias of one and none of another."""
    paths = set(paths)
    problems = []
    for trio in _TRIOS:
        ends = [f"{part}.bias" for part in trio]
        stems = {p.removesuffix(end) for p in paths for end in ends if _ends(p, end)}
        for stem in sorted(stems):
            there = [end for end in ends if f"{stem}{end}" in paths]
            beside = [part for part in trio if f"{stem}{part}.kernel" in paths]
            for end in ends:
                if end not in there and end.removesuffix(".bias") in beside:
                    text = f"expected biases of all three or of none, got {', '.join(there)}"
                    problems.append(Problem("missing", f"{stem}{end}", text))
    return problems


def wrong_heads(moves: Iterable[Move], sizes: HeadSizes) -> list[Problem]:
    """Kernels and biases whose heads are not as many as is said."""
    problems = []
    for move in moves:
        for path, shape in zip(move.row.paths, move.path_shapes, strict=True):
            count = _head_count(move.row, shape)
            part = path.split(".")[-2] if "." in path else ""
            expected = [getattr(sizes, _HEADS[part])] if part in _HEADS else [*sizes[:2]]
            if count is not None and count not in expected:
                said = " or ".join(map(str, dict.fromkeys(expected)))
                text = f"expected {said} heads of head_dim = {sizes.head_dim}, got {count}"
                problems.append(Problem("wrong shape", move.row.keys[0], f"{path}: {text}"))
    return problems


def wrong_widths(moves: Iterable[Move], blocks: Iterable[tuple[Place, Traits]]) -> list[Problem]:
    """Kernels of a block that are not as wide as the config says its model is."""
    found = {
        path: (move.row.keys[0], shape)
        for move in moves
        for path, shape in zip(move.row.paths, move.path_shapes, strict=True)
    }
    problems = []
    for place, traits in blocks:
        D, (kdim, vdim) = traits.embed_dim, traits.widths
        widths = {"q_proj": (0, D), "k_proj": (0, kdim), "v_proj": (0, vdim), "out_proj": (-1, D)}
        for part, (axis, width) in widths.items():
            path = f"{place.flax}.{part}.kernel"
            key, shape = found.get(path, ("", ()))
            if shape and shape[axis] != width:
                text = f"{path}: expected {width} features, as the config has it, got {shape[axis]}"
                problems.append(Problem("wrong shape", key, text))
    return problems


def other_layers(config: Mapping[str, Any], blocks: Iterable[Place]) -> list[Problem]:
    """Layers that the config counts and the checkpoint lacks, or the reverse."""
    found: dict[str, set[int]] = defaultdict(set)  # what stands before the number -> layers
    for place in blocks:
        stem, layer, _ = re.split(r"(\d+)", place.torch, maxsplit=1)
        found[stem].add(int(layer))
    problems: list[Problem] = []
    for stem, layers in (found or {"layer ": set()}).items():
        names = (*DECODER_LAYERS * ("decoder" in stem.split(".")), *LAYERS)
        read = Reading(config)
        said = read.number(*names, default=None, least=0)
        problems += read.problems
        if said is None or read.problems:
            continue
        if more := sorted(layer for layer in layers if layer >= said)[:_NAMED]:
            text = f"expected attention in {said} layers, as config.json has it, got it in {more}"
            problems.append(Problem("unexpected", f"{stem}{more[0]}", text))
        if gone := _gaps(layers, said):
            text = f"expected attention in {said} layers, as config.json has it, none is in {gone}"
            problems.append(Problem("missing", f"{stem}{gone[0]}", text))
    return list(dict.fromkeys(problems))


def _gaps(layers: set[int], count: int) -> list[int]:
    """The first of the `count` layers, which may be any number, that are not there."""
    looked_at = range(min(count, len(layers) + _NAMED))
    return [layer for layer in looked_at if layer not in layers][:_NAMED]


def _head_count(r: Row, shape: Shape) -> int | None:
    """How many heads a Flax array has, where its row gives it some."""
    if heads in r.steps and len(shape) >= 2:
        return shape[-2]
    return shape[0] if heads_in in r.steps and shape else None


def _strays(layout: Layout, names: Iterable[str]) -> list[str]:
    """Names that no row takes."""
    known = [*map(regex, (*layout.torch_keys(), *layout.flax_paths()))]
    return [name for name in names if not any(p.fullmatch(name) for p in known)]


def _weighs(module: str, table: Layout) -> set[str]:
    """What a bias stands beside: the module's own weight, where it has none all in it."""
    paths = {path for path in table.flax_paths() if path.startswith(f"{module}.")}
    return paths & {f"{module}.{leaf}" for leaf in ("kernel", "scale")} or paths


def _at(pattern: str, layer: int) -> str:
    return _FIRST_HOLE.sub(str(layer), pattern, count=1)


def _ends(path: str, end: str) -> bool:
    return path == end or path.endswith(f".{end}")
