"""The attention layers of a checkpoint: of a family that its config names, or as they are spelled.

Reads names, shapes and dtypes; no tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from jax_attn.attention.checks import ArgumentError
from jax_attn.dtypes import DTYPES
from jax_attn.parity.checkpoint import family_spellings, rebuild
from jax_attn.parity.checkpoint.layer import Layer, unmeasured
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.jax_settings import x64_for
from jax_attn.transfer import (
    Checkpoint,
    Layout,
    Problem,
    TransferError,
    heads,
    heads_in,
    linear,
    packed,
    plan,
    row,
)
from jax_attn.transfer.families import Family, Place, Traits, family_of
from jax_attn.transfer.files.prefixes import unwrapped
from jax_attn.transfer.inspect.config import Config, Sizes, lacking, seen_from, sizes
from jax_attn.transfer.inspect.discover import Block, Unread, discover
from jax_attn.transfer.port.checks import other_layers
from jax_attn.transfer.table import steps as transfer_steps

Arrays = Mapping[str, np.ndarray]

STATEMENT = "verified our rebuild of the attention weights, not the whole model"
_NO_CONFIG = "no config.json beside it: what else the model does in its attention is not known"
_SHOWN = 8


def survey(
    checkpoint: Checkpoint,
    config: Config | None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
) -> list[Layer | Result]:
    """The layers to verify, and a Result for each block that is not rebuilt.

    num_heads, num_kv_heads: N and K, where no config says, or as it does. Raises
    UnknownHeadsError; TransferError where there is no attention, and with everything that
    contradicts itself.
    """
    config = config if config is not None else {}
    family = family_of(config)
    if family is None:
        return _spelled(checkpoint, config, num_heads, num_kv_heads)
    try:
        places = family.blocks(config, checkpoint)
        traits = [family.traits(config, place.torch) for place in places]
    except TransferError as error:
        # Its config asks for what the table has no place for: what can be read is.
        why = tuple(f"family {family.name}: {problem.text}" for problem in error.problems)
        return _spelled(checkpoint, config, num_heads, num_kv_heads, why)
    if not places:
        _, wrapped = unwrapped(checkpoint)
        why = f"family {family.name}: none of its blocks is here"
        why += f"; {wrapped[0].text}: {wrapped[0].name}" if wrapped else ""
        return _spelled(checkpoint, config, num_heads, num_kv_heads, (why,))
    given = {"--num-heads": num_heads, "--num-kv-heads": num_kv_heads}
    found = [
        _family_layer(family, place, each, config, checkpoint)
        for place, each in zip(places, traits, strict=True)
    ]
    problems = [p for each in traits for p in _disagreements(each, given)]
    if not problems:
        problems = [p for x in found if isinstance(x, Layer) for p in _misfits(x, checkpoint)]
    if problems:
        raise TransferError("the layers of a family", dict.fromkeys(problems))
    # A part of a model may be verified, but does not pass for the whole.
    others = tuple(f"{p.name}: {p.text}" for p in other_layers(config, places))
    return [*found, unmeasured("layers", "unknown", doubts=others)] if others else found


# --- of a family --------------------------------------------------------------------------------


def _family_layer(
    family: Family, place: Place, traits: Traits, config: Config, checkpoint: Checkpoint
) -> Layer | Result:
    prefix, borrowed = place.torch, {}
    layout = family.block(config).under(prefix, "").spelled_as(checkpoint)
    if traits.lender:
        key = family_spellings.bias_table(family.name)
        borrowed[f"{prefix}.{key}"] = f"{traits.lender}.{key}"
        traits = replace(traits, bias=family.traits(config, traits.lender).bias)
    keys = tuple(key for key in layout.torch_keys() if key in checkpoint)
    below = [key.removeprefix(f"{prefix}.") for key in checkpoint if key.startswith(f"{prefix}.")]
    beside = [k for k in below if f"{prefix}.{k}" not in keys]
    dtypes = sorted({checkpoint.describe(key).dtype for key in keys})
    notes = [STATEMENT, f"family {family.name}"]
    notes += [f"beside it, and no part of the rebuild: {_first(beside)}"] if beside else []
    doubts = lacking({}, beside, traits.sizes.head_dim)
    if len(dtypes) > 1 or dtypes[0] not in DTYPES:
        text = f"not rebuilt: expected one of {', '.join(DTYPES)} for all of a block, got {dtypes}"
        return unmeasured(prefix, "unknown", doubts=(text, *doubts), notes=tuple(notes))

    def rows(arrays: Arrays) -> Arrays:
        own = {key.removeprefix(f"{prefix}."): array for key, array in arrays.items()}
        return family_spellings.state(family.name, traits, own)

    return Layer(
        *(prefix, keys, dtypes[0], traits, rows, layout),
        borrowed=borrowed,
        doubts=doubts,
        notes=tuple(notes),
    )


def _disagreements(traits: Traits, given: Mapping[str, int | None]) -> list[Problem]:
    return [
        Problem("ambiguous", option, f"expected {here}, as the config has it, got {said}")
        for (option, said), here in zip(given.items(), traits.sizes[:2], strict=True)
        if said is not None and said != here
    ]


def _misfits(layer: Layer, checkpoint: Checkpoint) -> list[Problem]:
    """What the file has otherwise than the config says."""
    with x64_for(layer.dtype):
        try:
            module = rebuild.flax_module(layer.traits, layer.dtype)
        except ArgumentError as error:
            return [Problem("file", f"config.json, {layer.name}", str(error))]
        return plan(module, _Part(checkpoint, layer), layer.layout).problems


class _Part(dict):
    """What a layer's table has of a checkpoint; nothing is read."""

    def __init__(self, checkpoint: Checkpoint, layer: Layer):
        super().__init__({key: key for key in layer.keys} | layer.borrowed)
        self.describe = lambda key: checkpoint.describe(self[key])


# --- as they are spelled ------------------------------------------------------------------------

# name of a part -> the Flax path, the steps from torch's rows to it
_PLACES = {
    "q.weight": ("q_proj.kernel", (linear, heads)),
    "k.weight": ("k_proj.kernel", (linear, heads)),
    "v.weight": ("v_proj.kernel", (linear, heads)),
    "o.weight": ("out_proj.kernel", (linear, heads_in)),
    "q.bias": ("q_proj.bias", (heads,)),
    "k.bias": ("k_proj.bias", (heads,)),
    "v.bias": ("v_proj.bias", (heads,)),
    "o.bias": ("out_proj.bias", ()),
}
_PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}


def _spelled(
    checkpoint: Checkpoint,
    config: Config,
    num_heads: int | None,
    num_kv_heads: int | None,
    why: tuple[str, ...] = (),
) -> list[Layer | Result]:
    """why: what a family's table has no place for, where the config names a family."""
    specs = {key: checkpoint.describe(key) for key in checkpoint}
    found = discover(specs, str(config.get("model_type", "")))
    if not found:
        text = f"expected attention, got {len(specs)} tensors that spell none: {_first([*specs])}"
        raise TransferError("finding attention", [Problem("file", str(checkpoint.path), text)])
    notes = (STATEMENT,) if config else (STATEMENT, _NO_CONFIG)
    surveyed: list[Layer | Result] = []
    problems: list[Problem] = []
    for block in found:
        seen = seen_from(config, block.prefix)
        if isinstance(block, Unread):
            doubts = (f"not rebuilt: {block.reason}", *why, *lacking(seen, block.beside))
            surveyed.append(unmeasured(block.name, "unknown", doubts=doubts, notes=notes))
            continue
        try:
            made = sizes(block, seen, num_heads, num_kv_heads)
        except TransferError as error:
            problems += error.problems
            continue
        doubts = (*why, *lacking(seen, block.beside, made.head_dim))
        surveyed.append(_spelled_layer(block, made, doubts, notes))
    if problems:
        # What the config says wrong, it says to every block.
        raise TransferError("heads", dict.fromkeys(problems))
    return surveyed


def _spelled_layer(
    block: Block, made: Sizes, doubts: tuple[str, ...], notes: tuple[str, ...]
) -> Layer:
    N, K, H, softcap = made
    traits = Traits(
        block.embed_dim,
        transfer_steps.HeadSizes(N, K, H),
        kdim=block.kdim,
        vdim=block.vdim,
        use_bias="q.bias" in block.parts,
        use_out_bias="o.bias" in block.parts,
        softcap=softcap,
    )
    zeros = {p.key: (p.rows,) for p in block.parts.values() if p.key in block.absent}
    doubts = (*doubts, *(f"{key} is not there, others are: zeros stand for it" for key in zeros))
    notes = (*notes, *_packed(block))
    if block.beside:
        notes = (*notes, f"beside it, and no part of the rebuild: {_first(block.beside)}")

    def rows(arrays: Arrays) -> Arrays:
        parts = ((*name.split("."), part) for name, part in block.parts.items())
        return {
            f"{_PROJECTIONS[r]}.{kind}": arrays[p.key][p.start : p.stop] for r, kind, p in parts
        }

    return Layer(
        *(block.name, block.keys, block.dtype, traits, rows, table(block)),
        zeros=zeros,
        doubts=doubts,
        notes=notes,
    )


def table(block: Block) -> Layout:
    """The transfer table between the block's own keys and the Flax module."""
    at: dict[str, list[str]] = {}
    for name, part in block.parts.items():
        at.setdefault(part.key, []).append(name)
    return Layout(*(_row(key, names) for key, names in at.items()))


def _row(key: str, names: list[str]):
    paths, steps = [_PLACES[name][0] for name in names], _PLACES[names[0]][1]
    return row(key, paths, *steps) if len(names) == 1 else row(key, paths, packed, *steps)


def _packed(block: Block) -> tuple[str, ...]:
    """No shape tells the order, which both sides take from the spelling."""
    key = block.parts["q.weight"].key
    is_packed = key == block.parts["k.weight"].key
    return (f"{key} read as query, key and value, one after another",) * is_packed


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
