"""What can be wrong with a port beyond its table: each check gives the problems it finds.

A table without a module to fill cannot know what should be there; layers that are not alike,
attention that is not whole and numbers that are none show that something is not. Needs no
framework.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np

from jax_attn.transfer.arrays import Spec, read
from jax_attn.transfer.families import Place, Traits
from jax_attn.transfer.families.config import DECODER_LAYERS, LAYERS, Reading
from jax_attn.transfer.layout import Layout
from jax_attn.transfer.problems import Problem, nearest
from jax_attn.transfer.resolve import Move
from jax_attn.transfer.rows import Row, bindings, filled, holes, regex
from jax_attn.transfer.steps import Shape, Sizes, grouped, heads, heads_in, packed

FLOATS = ("float16", "bfloat16", "float32", "float64")
SIZED = (heads, heads_in, grouped, packed)
"""Steps that no shape of flat projections tells how to take."""

_NAMED = 8
"""Missing layers that a message names."""

_CHUNK = 2**22
"""Numbers that are looked at at once."""

_TRIOS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))
_HEADS = {"q_proj": "num_heads", "out_proj": "num_heads"}
_HEADS |= dict.fromkeys(("k_proj", "v_proj"), "num_kv_heads")
_BIAS = ("position_bias", "embedding")  # one layer learns it, the others may borrow it
_FIRST_HOLE = re.compile(r"\{(\w+)\}")


def uneven(layout: Layout, names: Iterable[str], side: str) -> list[Problem]:
    """Layers of which one has what another lacks, and layers missing in between.

    names: those that are there; side: "keys" or "paths", of which side they are.
    """
    names = list(names)
    known = [
        regex(name)
        for group in layout.groups
        for alternative in group.alternatives
        for r in alternative
        for name in getattr(r, side)
    ]
    had: dict[str, dict[str, set[int]]] = defaultdict(dict)  # stem -> a pattern -> its layers
    for group in layout.groups:
        rows = [r for alternative in group.alternatives for r in alternative]
        borrowed = any(_BIAS[0] in path.split(".") for r in rows for path in r.paths)
        if len(holes(rows[0])) != 1 or borrowed:
            continue
        by_pattern = {name: bindings([name], names) for r in rows for name in getattr(r, side)}
        if met := [name for name, found in by_pattern.items() if found]:
            layers = {int(value) for name in met for ((_, value),) in by_pattern[name]}
            had[met[0][: _FIRST_HOLE.search(met[0]).start()]][met[0]] = layers
    strays = [name for name in names if not any(p.fullmatch(name) for p in known)]
    problems = []
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


def wrong_heads(moves: Iterable[Move], sizes: Sizes) -> list[Problem]:
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
        stem, layer = re.match(r"(.*?)(\d+)", place.torch).groups()
        found[stem].add(int(layer))
    problems = []
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


def bad_values(
    tensors: Mapping[str, Any],
    key: str,
    spec: Spec,
    dtype: str | None,
    *,
    lossy: bool,
    allow_nonfinite: bool,
) -> Iterator[Problem]:
    """Numbers of a tensor that are none, and those that `dtype` does not hold.

    dtype: what floating numbers are cast to; None leaves them. lossy: whether that may lose.
    """
    if spec.dtype not in FLOATS:
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
        yield Problem("not finite", key, text, "--allow-nonfinite carries them as they are")
    if changed:
        text = f"expected {to} to hold its {spec.dtype} numbers, {changed} of {flat.size} change"
        text += f", {overflown} of them to infinity" if overflown else ""
        yield Problem("wrong dtype", key, text, "--lossy rounds them")


def recast(array: np.ndarray, dtype: str) -> np.ndarray:
    """Floating numbers in another dtype, what is too large as infinite; all else as it is."""
    if array.dtype.name not in FLOATS:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype, copy=False)


def _head_count(r: Row, shape: Shape) -> int | None:
    """How many heads a Flax array has, where its row gives it some."""
    if heads in r.steps and len(shape) >= 2:
        return shape[-2]
    return shape[0] if heads_in in r.steps and shape else None


def _at(pattern: str, layer: int) -> str:
    name = _FIRST_HOLE.search(pattern)[1]
    return filled((pattern,), ((name, str(layer)),))[0]


def _ends(path: str, end: str) -> bool:
    return path == end or path.endswith(f".{end}")
