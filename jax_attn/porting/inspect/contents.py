"""Contents of a checkpoint: family, attention, layers, dtypes, ties; from headers and config.

The config names the family; without one, attention is found by the spelling of its keys. What
neither shapes nor config decide is unknown. Imports no framework.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax_attn.families import Config, family_of, model_problems, said_type
from jax_attn.families.family import Family, Prefixes, other_layers, prefixed
from jax_attn.families.traits import Traits
from jax_attn.porting.inspect.config import (
    UnknownHeadsError,
    head_counts,
    lacking,
    seen_from,
    typed,
)
from jax_attn.porting.inspect.discover import Block, UnreadBlock, discover
from jax_attn.porting.port.parts import incomplete
from jax_attn.porting.port.plan import reached
from jax_attn.porting.port.shapes import wrong_heads, wrong_widths
from jax_attn.transfer.arrays import Spec
from jax_attn.transfer.problems import Problem, TransferError
from jax_attn.transfer.table.layout import Layout, moves_by_sizes
from jax_attn.transfer.table.rows import bindings

Specs = Mapping[str, Spec]

_PACKINGS = {"packed": "query, key, value one after another", "grouped": "by key/value head"}


@dataclass(frozen=True)
class Attention:
    """One block, or several that are alike.

    places: torch's prefixes. design: MHA, MQA or GQA, or what is known of it. None: not known.
    packed: "" for split projections, else how one tensor holds three. does: its other traits, by
    name. doubts: what could not be determined.
    """

    places: tuple[str, ...]
    design: str
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    embed_dim: int | None = None
    dtype: tuple[str, ...] = ()
    packed: str = ""
    bytes: int = 0
    does: dict[str, Any] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contents:
    """Result of `inspect`.

    dtypes: name -> tensors and bytes. tied: key -> the key whose tensor it is. has_model: whether
    `jax_attn.models.load` supports it; if not, although the family is known, a note says why.
    experts: how many MLPs a layer has (number), and how many a token is sent to (chosen), if a
    model that is supported has several.
    """

    family: str | None
    model_type: str | None
    root: str
    layers: int
    tensors: int
    bytes: int
    dtypes: dict[str, dict[str, int]]
    attention: list[Attention]
    tied: dict[str, str]
    notes: list[str]
    has_model: bool = False
    experts: dict[str, Any] | None = None


def inspect(
    specs: Specs, config: Config | None, tied: Mapping[str, str], unreadable: Sequence[Problem] = ()
) -> Contents:
    """Return the contents of a checkpoint.

    specs: torch key to shape and dtype. config: None if there is none. tied: key to the key whose
    memory it shares. unreadable: problems of the other tensors. Raises TransferError with every
    contradiction, and with these.
    """
    known = config or {}
    kind = known.get("model_type")
    family = family_of(known)
    if family is None:
        root, as_typed = "", typed(known)
        blocks = [
            _block_as_spelled(block, seen_from(as_typed, block.prefix), specs)
            for block in discover(specs, str(as_typed.get("model_type", "")))
        ]
        why = "no config.json" if config is None else f"model_type {said_type(known)}"
        notes = [f"{why}: the family is not known"]
    else:
        root = family.root(known, specs)
        blocks = _blocks_of_family(family, known, specs, unreadable)
        tied, notes = _ties(family.model(known, specs), specs, tied)
        if kind is None and (kind := family.model_type(known)) is not None:
            notes.append(
                f"config.json has no model_type: {kind} by its architectures; transformers' Auto "
                "classes need it"
            )
        notes += [f"no whole model: {problem}" for problem in model_problems(known)]
    has_model = family is not None and not model_problems(known)
    experts = family.model_traits(known).blocks[0].mlp.experts if family and has_model else None
    # A place up to its first number: decoder.block.3.
    numbered = (re.match(r".*?\d+", place) for block in blocks for place in block.places)
    layers = {match[0] for match in numbered if match}
    return Contents(
        family=family.name if family else None,
        model_type=kind,
        root=root,
        layers=len(layers),
        tensors=len(specs),
        bytes=sum(spec.nbytes for spec in specs.values()),
        dtypes=_dtypes(specs),
        attention=_together(blocks),
        tied=dict(tied),
        notes=notes,
        has_model=has_model,
        experts=experts and experts._asdict(),
    )


def design(num_heads: int, num_kv_heads: int) -> str:
    """Return the name of attention with N and K heads: MHA, MQA or GQA."""
    if num_kv_heads == num_heads:
        return "MHA"
    return "MQA" if num_kv_heads == 1 else "GQA"


# --- by the family ------------------------------------------------------------------------------


def _blocks_of_family(
    family: Family, config: Config, specs: Specs, unreadable: Sequence[Problem]
) -> list[Attention]:
    table = family.block(config)
    hidden = [problem.name for problem in unreadable]
    blocks, problems, places = [], [], []
    for place in family.blocks(config, specs):
        traits = family.traits(config, place.torch)
        try:
            block, misfits = _block_at(place, traits, table.under(*place), specs, hidden)
        except TransferError as error:
            problems += error.problems
            continue
        blocks.append(block)
        places.append(place)
        problems += misfits
    problems += prefixed(family, config, specs) or other_layers(config, places)
    if problems:
        problems = [*unreadable, *dict.fromkeys(problems)]
        raise TransferError("comparing the checkpoint with its config", problems)
    return blocks


def _block_at(
    place: Prefixes, traits: Traits, table: Layout, specs: Specs, hidden: Sequence[str]
) -> tuple[Attention, list[Problem]]:
    """Return one block, and where the file differs from its traits.

    table: that of the block, at its place. hidden: keys that cannot be read. Raises TransferError
    if shapes do not fit the table.
    """
    patterns = [*table.torch_keys(), *(item.key for item in table.passed_over)]
    keys = {key: spec for key, spec in specs.items() if bindings(patterns, [key])}
    moves = moves_by_sizes(table, {key: spec.shape for key, spec in keys.items()}, traits.sizes)
    paths = [path for move in moves for path in move.row.paths]
    problems = [*wrong_heads(moves, traits.sizes)]
    problems += incomplete([(place, traits)], [*paths, *reached(table, hidden)])
    problems += wrong_widths(moves, [(place, traits)])
    packings = (_PACKINGS.get(s.name) for m in moves if len(m.row.paths) == 3 for s in m.row.steps)
    N, K, H = traits.sizes
    block = Attention(
        *((place.torch,), design(N, K), N, K, H, traits.embed_dim),
        packed=next(filter(None, packings), ""),
        does=_does(traits),
        **_held(keys),
    )
    return block, problems


def _does(traits: Traits) -> dict[str, Any]:
    """Return traits by name, those of several fields as dicts."""
    names = (
        *("cross", "is_causal", "scale", "sinks", "softcap"),
        *("use_bias", "use_out_bias", "window"),
    )
    does = {name: getattr(traits, name) for name in names}
    does["scale"] = does["scale"] or f"1/√{traits.sizes.head_dim}"
    several = {"qk_norm": traits.qk_norm, "rotary": traits.rotary, "position_bias": traits.bias}
    return does | {name: value and value._asdict() for name, value in several.items()}


def _ties(
    layout: Layout, specs: Specs, tied: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return tied keys, by shared memory and by the family's table; and notes on ties stored twice.

    The table knows of ties whether the file has both keys or leaves one out.
    """
    parts = {key.split(".")[0] for key in specs}
    by_table = {
        i.key: i.same_as
        for i in layout.passed_over
        # A head of several parts that are all absent belongs to another model.
        if i.same_as in specs and (i.key.count(".") < 2 or i.key.split(".")[0] in parts)
    }
    apart = [k for k, other in by_table.items() if k in specs and other not in _same(k, tied)]
    notes = [f"tied by the config, but stored separately: {key}, {by_table[key]}" for key in apart]
    return {**tied, **{k: other for k, other in by_table.items() if k not in apart}}, notes


def _same(key: str, tied: Mapping[str, str]) -> set[str]:
    """Return the keys that share a key's memory."""
    first = tied.get(key, key)
    return {first, *(other for other, kept in tied.items() if kept == first)}


# --- by spelling --------------------------------------------------------------------------------


def _block_as_spelled(block: Block, config: Config, specs: Specs) -> Attention:
    """Return the block's attention, as far as it is known; config: as seen from the block."""
    held = _held({key: specs[key] for key in block.keys})
    if isinstance(block, UnreadBlock):
        doubts = (f"not read: {block.reason}", *lacking(config, block.beside))
        return Attention((block.name,), "unknown", doubts=doubts, **held)
    query, key = (block.rows[f"{role}.weight"] for role in "qk")
    does: dict[str, Any] = {"use_bias": "q.bias" in block.rows}
    does["use_out_bias"] = "o.bias" in block.rows
    does["add_bias_kv"] = "bias_k" in block.rows
    N = K = H = None
    try:
        (N, K, H), does["softcap"] = head_counts(block, config, None, None)
        kind, doubts = design(N, K), ()
    except UnknownHeadsError:
        G, odd = divmod(query.length, key.length)
        kind = "MHA" if G == 1 and not odd else f"MQA or GQA, {G} queries a key/value head"
        doubts = (f"heads: num_heads cannot be inferred from {query.length} query rows",)
    return Attention(
        *((block.name,), kind, N, K, H, block.embed_dim),
        packed=_PACKINGS["packed"] if query.key == key.key else "",
        does=does,
        doubts=(*doubts, *lacking(config, block.beside, H)),
        **held,
    )


# --- shared -------------------------------------------------------------------------------------


def _held(keys: Specs) -> dict[str, Any]:
    """Return the dtypes and the bytes of a block's tensors."""
    dtypes = tuple(sorted({spec.dtype for spec in keys.values()}))
    return {"dtype": dtypes, "bytes": sum(spec.nbytes for spec in keys.values())}


def _together(blocks: Iterable[Attention]) -> list[Attention]:
    """Merge blocks that differ only in their places."""
    alike: dict[str, list[Attention]] = defaultdict(list)
    for block in blocks:
        unplaced = replace(block, places=(), doubts=tuple(map(_unnumbered, block.doubts)))
        alike[f"{_unnumbered(block.places[0])} {unplaced}"].append(block)
    return [
        replace(same[0], places=tuple(place for block in same for place in block.places))
        for same in alike.values()
    ]


def _dtypes(specs: Specs) -> dict[str, dict[str, int]]:
    dtypes: dict[str, dict[str, int]] = {}
    for spec in specs.values():
        held = dtypes.setdefault(spec.dtype, {"tensors": 0, "bytes": 0})
        held["tensors"] += 1
        held["bytes"] += spec.nbytes
    return dtypes


def _unnumbered(text: str) -> str:
    return re.sub(r"\d+", "{i}", text)
