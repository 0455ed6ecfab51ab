"""Checks for missing parts of a port; each yields the problems that it finds.

A table without a module does not know what should be there. Missing parts are detected by layers
that differ, incomplete attention, and parts that its family always has. Needs no framework.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from typing import Literal

from jax_attn.families.family import Prefixes, gaps
from jax_attn.families.traits import Traits
from jax_attn.transfer.problems import Problem, nearest
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.rows import bindings, holes, regex

RowSide = Literal["keys", "paths"]
"""The side of a row: torch's keys, or Flax's paths."""

_TRIOS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))
_PROJECTIONS = (*_TRIOS[0], "out_proj")
_TABLE = "position_bias.embedding"  # one layer learns it, others may borrow it
_BARE = ("classifier",)  # in decoders, that for sequences has no bias, that for tokens has one
_FIRST_HOLE = re.compile(r"\{(\w+)\}")


def uneven(layout: Layout, names: Iterable[str], side: RowSide) -> Iterator[Problem]:
    """Report layers that lack what another layer has, and gaps in the layers' numbers.

    names: those that are present; side: the side that they belong to.
    """
    names = list(names)
    layers_of: dict[str, dict[str, set[int]]] = defaultdict(dict)  # stem -> pattern -> layers
    for group in layout.groups:
        borrowed = any("position_bias" in path.split(".") for r in group.rows for path in r.paths)
        if len(holes(group.rows[0])) != 1 or borrowed:
            continue
        by_pattern = {n: bindings([n], names) for r in group.rows for n in getattr(r, side)}
        if present := [pattern for pattern, met in by_pattern.items() if met]:
            layers = {int(value) for pattern in present for ((_, value),) in by_pattern[pattern]}
            layers_of[present[0].partition("{")[0]][present[0]] = layers
    strays = _strays(layout, names)
    for stem, patterns in layers_of.items():
        layers = set().union(*patterns.values())
        if absent := gaps(layers, max(layers) + 1):
            text = f"expected layers 0 to {max(layers)}, but layers {absent} are missing"
            yield Problem("missing", f"{stem}{absent[0]}", text)
        for pattern, present_in in patterns.items():
            for layer in sorted(layers - present_in):
                text = (
                    f"layer {layer} lacks it, but {len(present_in)} of {len(layers)} layers have it"
                )
                key = _at(pattern, layer)
                yield Problem("missing", key, text, nearest(key, strays))


def missing_parts(
    layout: Layout,
    beside: tuple[Layout, Set[str]],
    blocks: Iterable[Prefixes],
    names: Iterable[str],
    side: RowSide,
) -> Iterator[Problem]:
    """Report kernels, scales, biases and embeddings outside the blocks that no layer has.

    layout: the whole table; beside: the table without blocks, and its Flax parts that may be
    absent; a bias is needed if its kernel or scale is present. names, side: as in `uneven`, which
    reports what only some layers lack.
    """
    (table, optional), names, places = beside, list(names), [place.flax for place in blocks]
    # A block needs its norm; a side without blocks, such as a T5's decoder, needs nothing.
    optional = optional - {f"{place.rpartition('.')[2]}_norm" for place in places}
    sides = {path.split(".")[0] for path in table.flax_paths() if _FIRST_HOLE.search(path)}
    optional |= sides - {place.split(".")[0] for place in places}
    met = (r for g in table.groups for r in g.rows if bindings(getattr(r, side), names))
    there = {path for r in met for path in r.paths}
    strays = _strays(layout, names)
    for group in table.groups:
        first = group.rows[0]
        module, _, leaf = first.paths[0].rpartition(".")
        may_lack = not optional.isdisjoint(first.paths[0].split("."))
        present = any(path in there for r in group.rows for path in r.paths)
        if leaf == "bias":
            may_lack = module in _BARE or not _weighs(module, table) & there
        elif may_lack:
            may_lack = f"{module}.bias" not in there
        if present or may_lack:
            continue
        text = "every model of this family has it"
        text = (
            "every model of this family has it in each layer; here no layer has it"
            if holes(first)
            else text
        )
        if leaf == "kernel" and module == "lm_head":
            text = "config.json names an architecture with an untied head"
        name, *others = dict.fromkeys(
            _at(getattr(rows[0], side)[0], 0) for rows in group.alternatives
        )
        text += f"; {' or '.join(others)} could replace it" if others else ""
        yield Problem("missing", name, text, nearest(name, strays))


def incomplete(
    blocks: Iterable[tuple[Prefixes, Traits]], paths: Iterable[str]
) -> Iterator[Problem]:
    """Report what an attention block lacks that its traits need, or has that they exclude."""
    paths = set(paths)
    for place, traits in blocks:
        learned = traits.bias is not None and traits.bias.kind == "relative" and not traits.lender
        norm_biases = {"q_norm.bias", "k_norm.bias"}
        needed_where = {  # whether a block needs it
            **dict.fromkeys((f"{part}.kernel" for part in _PROJECTIONS), True),
            **dict.fromkeys((f"{part}.bias" for part in _TRIOS[0]), traits.use_bias),
            "out_proj.bias": traits.use_out_bias,
            **dict.fromkeys(("q_norm.scale", "k_norm.scale"), traits.qk_norm is not None),
            _TABLE: learned,
            "sinks": traits.sinks,
        }
        needed = {name for name, is_needed in needed_where.items() if is_needed}
        possible = {*needed_where, *norm_biases}
        present = {name for name in possible if f"{place.flax}.{name}" in paths}
        for name in sorted(needed - present):
            text = f"by the config, the attention at {place.torch!r} needs it"
            yield Problem("missing", f"{place.flax}.{name}", text)
        for name in sorted(present - needed - (norm_biases if traits.qk_norm else set())):
            text = f"by the config, the attention at {place.torch!r} does not have it"
            yield Problem("unexpected", f"{place.flax}.{name}", text)


def some_biases(layout: Layout, paths: Iterable[str]) -> Iterator[Problem]:
    """Report query, key and value projections of which only some have a bias that has a row."""
    paths, rows = set(paths), [*map(regex, layout.flax_paths())]
    for trio in _TRIOS:
        ends = [f"{part}.bias" for part in trio]
        stems = {p.removesuffix(end) for p in paths for end in ends if f".{p}".endswith(f".{end}")}
        for stem in sorted(stems):
            there = [end for end in ends if f"{stem}{end}" in paths]
            for part, end in zip(trio, ends, strict=True):
                has_row = any(row.fullmatch(f"{stem}{end}") for row in rows)
                if end not in there and f"{stem}{part}.kernel" in paths and has_row:
                    text = f"expected biases of all three or of none, got {', '.join(there)}"
                    yield Problem("missing", f"{stem}{end}", text)


def _strays(layout: Layout, names: Iterable[str]) -> list[str]:
    """Return names that belong to no row."""
    known = [*map(regex, (*layout.torch_keys(), *layout.flax_paths()))]
    return [name for name in names if not any(p.fullmatch(name) for p in known)]


def _weighs(module: str, table: Layout) -> set[str]:
    """Return the weight next to a bias: the module's kernel or scale, or else all its paths."""
    paths = {path for path in table.flax_paths() if path.startswith(f"{module}.")}
    return paths & {f"{module}.{leaf}" for leaf in ("kernel", "scale")} or paths


def _at(pattern: str, layer: int) -> str:
    return _FIRST_HOLE.sub(str(layer), pattern, count=1)
