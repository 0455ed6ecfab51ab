"""What a checkpoint is: family, attention, layers, dtypes, ties; from its headers and its config.

The family is what the config names; without one, attention is found by how its keys are spelt.
What neither shapes nor config decide stays unknown. Imports no framework.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jax_attn.transfer.arrays import Spec
from jax_attn.transfer.families import Config, Family, Place, Traits, family_of
from jax_attn.transfer.inspect.config import UnknownHeadsError, lacking, seen_from, sizes
from jax_attn.transfer.inspect.discover import Block, Unread, discover
from jax_attn.transfer.port.checks import incomplete, other_layers, wrong_heads, wrong_widths
from jax_attn.transfer.port.plan import reached
from jax_attn.transfer.problems import Problem, TransferError
from jax_attn.transfer.table import resolve
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.rows import bindings

Specs = Mapping[str, Spec]

_HOW = {"packed": "query, key, value one after another", "grouped": "by key/value head"}


@dataclass(frozen=True)
class Attention:
    """One block, or several that are alike.

    places: torch's prefixes. design: MHA, MQA or GQA, or what is known of it. None: not known.
    packed: "" for split projections, else how one tensor holds three. does: its other traits,
    by name. doubts: what the block does and nobody here can say.
    """

    places: tuple[str, ...]
    design: str
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    embed_dim: int | None
    dtype: tuple[str, ...]
    packed: str
    bytes: int
    does: dict[str, Any] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contents:
    """What `inspect` found. dtypes: name -> tensors and bytes. tied: key -> whose tensor it is."""

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

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def inspect(
    specs: Specs,
    config: Config | None,
    tied: Mapping[str, str],
    unreadable: Sequence[Problem] = (),
) -> Contents:
    """What a checkpoint is.

    specs: torch key to shape and dtype. config: None where there is none. tied: key to the key
    whose very memory it is. unreadable: the tensors besides, and why. Raises TransferError with
    everything that contradicts itself, and with these.
    """
    known = config or {}
    family = family_of(known)
    if family is not None:
        root = family.root(known, specs)
        found, layout = _of_family(family, known, specs, unreadable), family.model(known, specs)
        said = _said_tied(layout, specs)
        apart = {key for key in said if key in specs and said[key] not in _same(key, tied)}
        tied = {**tied, **{key: other for key, other in said.items() if key not in apart}}
        notes = [f"tied by the config, and held apart: {k}, {said[k]}" for k in said if k in apart]
    else:
        root, found = "", _spelt(specs, known)
        notes = [
            "no config.json beside it: the family is not known"
            if config is None
            else f"model_type {known.get('model_type')!r}: the family is not known"
        ]
    numbers = {numbered for one in found for place in one.places if (numbered := _layer(place))}
    return Contents(
        family.name if family else None,
        known.get("model_type"),
        root,
        len(numbers),
        len(specs),
        sum(spec.nbytes for spec in specs.values()),
        _dtypes(specs),
        _together(found),
        dict(tied),
        notes,
    )


def design(num_heads: int, num_kv_heads: int) -> str:
    """What N and K make of attention."""
    if num_kv_heads == num_heads:
        return "MHA"
    return "MQA" if num_kv_heads == 1 else "GQA"


def _of_family(
    family: Family, config: Config, specs: Specs, unreadable: Sequence[Problem]
) -> list[Attention]:
    block = family.block(config)
    made, problems = [], []
    for place in family.blocks(config, specs):
        traits = family.traits(config, place.torch)
        under = block.under(*place)
        keys = {key: spec for key, spec in specs.items() if _takes(under, key)}
        shapes = {key: spec.shape for key, spec in keys.items()}
        carried = {
            k: s for k, s in shapes.items() if k not in resolve.passed(under.passed_over, [k])
        }
        try:
            paths = under.shapes(carried, traits.sizes)
        except TransferError as error:
            problems += error.problems
            continue
        moves, _ = resolve.for_loading(under.groups, under.refusals, carried, paths)
        hidden = reached(under, [problem.name for problem in unreadable])
        problems += wrong_heads(moves, traits.sizes)
        problems += incomplete([(place, traits)], [*paths, *hidden])
        problems += wrong_widths(moves, [(place, traits)])
        packed = next(
            (_HOW[s.name] for m in moves for s in m.row.steps if s.name in _HOW and _three(m)), ""
        )
        made.append(_attention(place, traits, keys, packed))
    problems += other_layers(config, [Place(p, "") for one in made for p in one.places])
    if problems:
        problems = [*unreadable, *dict.fromkeys(problems)]
        raise TransferError("what the config says of the checkpoint", problems)
    return made


def _attention(place: Place, traits: Traits, keys: Specs, packed: str) -> Attention:
    N, K, H = traits.sizes
    plain = {"use_bias", "use_out_bias", "is_causal", "cross", "scale", "softcap", "window"}
    does = {name: getattr(traits, name) for name in sorted(plain)}
    does["scale"] = does["scale"] or f"1/√{H}"
    for name in ("qk_norm", "rotary", "bias"):
        value = getattr(traits, name)
        does["position_bias" if name == "bias" else name] = value and value._asdict()
    return Attention(
        (place.torch,),
        design(N, K),
        N,
        K,
        H,
        traits.embed_dim,
        tuple(sorted({spec.dtype for spec in keys.values()})),
        packed,
        sum(spec.nbytes for spec in keys.values()),
        does,
    )


def _spelt(specs: Specs, config: Config) -> list[Attention]:
    """What the keys spell, where no family says more."""
    made = []
    for found in discover(specs, str(config.get("model_type", ""))):
        seen = seen_from(config, found.prefix)
        keys = {key: specs[key] for key in found.keys}
        dtypes = tuple(sorted({spec.dtype for spec in keys.values()}))
        count = sum(spec.nbytes for spec in keys.values())
        if isinstance(found, Unread):
            doubts = (f"not read: {found.reason}", *lacking(seen, found.beside))
            nothing = (None,) * 4
            made.append(
                Attention((found.name,), "unknown", *nothing, dtypes, "", count, doubts=doubts)
            )
            continue
        made.append(_of_block(found, seen, dtypes, count))
    return made


def _of_block(block: Block, config: Config, dtypes: tuple[str, ...], count: int) -> Attention:
    query, key = (block.parts[f"{role}.weight"] for role in "qk")
    does = {"use_bias": "q.bias" in block.parts, "use_out_bias": "o.bias" in block.parts}
    try:
        N, K, H, does["softcap"] = sizes(block, config, None, None)
        kind, unknown = design(N, K), ()
    except UnknownHeadsError:
        N = K = H = None
        G, odd = divmod(query.rows, key.rows)
        kind = "MHA" if G == 1 and not odd else f"MQA or GQA, {G} queries a key/value head"
        unknown = (f"heads: {query.rows} query rows, how many heads they are no shape tells",)
    packed = _HOW["packed"] if query.key == key.key else ""
    doubts = (*unknown, *lacking(config, block.beside, H))
    return Attention(
        (block.name,), kind, N, K, H, block.embed_dim, dtypes, packed, count, does, doubts
    )


def _together(found: Iterable[Attention]) -> list[Attention]:
    """Blocks that are alike but for where they lie, as one."""
    alike: dict[str, list[Attention]] = defaultdict(list)
    for one in found:
        unplaced = replace(one, places=(), doubts=tuple(map(_open, one.doubts)))
        alike[f"{_open(one.places[0])} {unplaced}"].append(one)
    return [
        replace(same[0], places=tuple(p for o in same for p in o.places)) for same in alike.values()
    ]


def _dtypes(specs: Specs) -> dict[str, dict[str, int]]:
    count = Counter(spec.dtype for spec in specs.values())
    of = {name: [spec for spec in specs.values() if spec.dtype == name] for name in count}
    return {
        name: {"tensors": len(those), "bytes": sum(spec.nbytes for spec in those)}
        for name, those in of.items()
    }


def _said_tied(layout: Layout, specs: Specs) -> dict[str, str]:
    """Ties that the family's table knows of, whether the file has both or leaves one out."""
    made = {}
    for item in layout.passed_over:
        if item.same_as in specs:
            made[item.key] = item.same_as
    return made


def _same(key: str, tied: Mapping[str, str]) -> set[str]:
    """The keys that share a key's memory."""
    first = tied.get(key, key)
    return {first, *(other for other, kept in tied.items() if kept == first)}


def _takes(layout: Layout, key: str) -> bool:
    return bool(bindings([*layout.torch_keys(), *(i.key for i in layout.passed_over)], [key]))


def _three(move: resolve.Move) -> bool:
    return len(move.row.paths) == 3


def _layer(place: str) -> str:
    """What a block's place is numbered by: decoder.block.3."""
    found = re.match(r".*?\d+", place)
    return found[0] if found else ""


def _open(text: str) -> str:
    return re.sub(r"\d+", "{i}", text)
