"""Find the attention layers of a checkpoint, by the family of its config or by their names.

Reads names, shapes and dtypes, but no tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from jax_attn.attention.checks import ArgumentError
from jax_attn.dtypes import DTYPES
from jax_attn.families import Config, family_of
from jax_attn.families.config import disagreements
from jax_attn.families.family import Family, Prefixes, other_layers
from jax_attn.families.traits import Traits
from jax_attn.parity.judge.finding import Finding, findings
from jax_attn.parity.run.port import x64_for
from jax_attn.porting.inspect.config import (
    KEYS_WITHOUT_BIAS,
    UnknownHeadsError,
    head_counts,
    lacking,
    seen_from,
    typed,
)
from jax_attn.porting.inspect.discover import AttentionBlock, UnreadBlock, discover
from jax_attn.porting.inspect.starting_rows import rows_of
from jax_attn.porting.verify import family_spellings, rebuild
from jax_attn.porting.verify.layer import AttentionLayer, Surveyed, unmeasured
from jax_attn.transfer import Layout, Problem, TransferError, plan
from jax_attn.transfer.files.port_folder import LazyTensors
from jax_attn.transfer.files.prefixes import Renamed, unwrapped
from jax_attn.transfer.table.steps import Sizes

Arrays = Mapping[str, np.ndarray]
Options = Mapping[str, int | None]
"""--num-heads and --num-kv-heads, in this order."""

STATEMENT = "verified our rebuild of the attention weights, not the whole model"
STATEMENT_OF_PORTS = "verified the attention weights that were written, not the whole model"
_NO_CONFIG = "there is no config.json, so other features of the model's attention are unknown"
_NO_MASK = (
    "the mask of the model, such as causality, is not known from names and was not compared; "
    "jax-attn translate CHECKPOINT OUT compares a whole model"
)
_SHOWN = 8


def survey(
    checkpoint: LazyTensors,
    config: Config | None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
) -> list[Surveyed]:
    """Return the layers to verify, and a Result for each block that is not rebuilt.

    num_heads, num_kv_heads: N and K, needed if no config has them; else they must agree with it.
    Raises UnknownHeadsError; TransferError if there is no attention, and with every contradiction.
    """
    config = config if config is not None else {}
    options = {"--num-heads": num_heads, "--num-kv-heads": num_kv_heads}
    family = family_of(config)
    if family is None:
        return _layers_by_spelling(checkpoint, config, options, ())
    try:
        places = family.blocks(config, checkpoint)
        blocks = [(place, family.traits(config, place.torch)) for place in places]
    except TransferError as error:
        # The family's table does not support this config; read the blocks by their names instead.
        why = [f"family {family.name}: {problem.text}" for problem in error.problems]
        return _layers_by_spelling(checkpoint, config, options, findings("beyond-rebuild", why))
    if blocks:
        return _layers_of_family(family, blocks, config, checkpoint, options)
    _, wrapped = unwrapped(checkpoint)
    reason = f"family {family.name}: none of its blocks is here"
    reason += f"; {wrapped[0].text}: {wrapped[0].name}" if wrapped else ""
    return _layers_by_spelling(checkpoint, config, options, findings("not-rebuilt", [reason]))


def survey_port(source: LazyTensors, config: Config, sizes: Sizes | None) -> list[Surveyed]:
    """Return the attention layers that a port carried, and a Result for each one not rebuilt.

    sizes: the port's N, K and H, if no config has them.
    """
    N, K, _ = sizes or (None, None, None)
    try:
        return survey(source, config, N, K)
    except (UnknownHeadsError, TransferError) as error:
        doubts, notes = (f"not rebuilt: {error}",), (STATEMENT_OF_PORTS,)
        return [unmeasured("attention", "unknown", doubts=doubts, notes=notes)]


# --- of a family --------------------------------------------------------------------------------


def _layers_of_family(
    family: Family,
    blocks: Sequence[tuple[Prefixes, Traits]],
    config: Config,
    checkpoint: LazyTensors,
    options: Options,
) -> list[Surveyed]:
    layers = [_family_layer(family, *block, config, checkpoint) for block in blocks]
    problems = [p for _, traits in blocks for p in disagreements(options, traits.sizes[:2])]
    if not problems:
        rebuilt = (layer for layer in layers if isinstance(layer, AttentionLayer))
        problems = [problem for layer in rebuilt for problem in _misfits(layer, checkpoint)]
    if problems:
        raise TransferError("the layers of a family", dict.fromkeys(problems))
    # A part of a model may be verified, but does not pass for the whole.
    others = other_layers(config, [place for place, _ in blocks])
    doubts = tuple(f"{problem.name}: {problem.text}" for problem in others)
    return [*layers, unmeasured("layers", "unknown", doubts=doubts)] if doubts else layers


def _family_layer(
    family: Family, place: Prefixes, traits: Traits, config: Config, checkpoint: LazyTensors
) -> Surveyed:
    prefix = place.torch
    layout = family.block(config).under(prefix, "").spelled_as(checkpoint)
    keys = [key for key in layout.torch_keys() if key in checkpoint]
    sources = dict(zip(keys, keys, strict=True))
    if traits.lender:
        key = family_spellings.bias_table(family.name)
        sources[f"{prefix}.{key}"] = f"{traits.lender}.{key}"
        traits = replace(traits, bias=family.traits(config, traits.lender).bias)
    below = [key for key in checkpoint if key.startswith(f"{prefix}.")]
    beside = [key.removeprefix(f"{prefix}.") for key in below if key not in keys]
    dtypes = sorted({checkpoint.describe(key).dtype for key in keys})
    notes = (STATEMENT, f"family {family.name}", *_note_beside(beside))
    doubts = findings("beyond-rebuild", lacking({}, beside, traits.sizes.head_dim))
    if len(dtypes) > 1 or dtypes[0] not in DTYPES:
        text = f"not rebuilt: expected one of {', '.join(DTYPES)} for all of a block, got {dtypes}"
        return unmeasured(prefix, "unknown", doubts=(text, *doubts), notes=notes)

    def rows(arrays: Arrays) -> Arrays:
        own = {key.removeprefix(f"{prefix}."): array for key, array in arrays.items()}
        return family_spellings.state(family.name, traits, own)

    return AttentionLayer(
        *(prefix, sources, dtypes[0], traits, rows, layout), doubts=doubts, notes=notes
    )


def _misfits(layer: AttentionLayer, checkpoint: LazyTensors) -> list[Problem]:
    """Report where the file differs from the config."""
    with x64_for(layer.dtype):
        try:
            module = rebuild.flax_module(layer.traits, layer.dtype)
        except ArgumentError as error:
            return [Problem("file", f"config.json, {layer.name}", str(error))]
        return plan(module, Renamed(checkpoint, layer.keys), layer.layout).problems


# --- by their names -----------------------------------------------------------------------------

_PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}


def _layers_by_spelling(
    checkpoint: LazyTensors, config: Config, options: Options, why: tuple[Finding, ...]
) -> list[Surveyed]:
    """Return the layers found by their names, and a Result for each block that is not rebuilt.

    why: the reasons against a family's table, if the config names a family."""
    specs = {key: checkpoint.describe(key) for key in checkpoint}
    config = typed(config)
    blocks = discover(specs, str(config.get("model_type", "")))
    if not blocks:
        text = f"expected attention, got {len(specs)} tensors that spell none: {_first([*specs])}"
        raise TransferError("finding attention", [Problem("file", str(checkpoint.path), text)])
    notes = (STATEMENT, _NO_MASK, *([] if config else [_NO_CONFIG]))
    layers: list[Surveyed] = []
    problems: list[Problem] = []
    for block in blocks:
        seen = seen_from(config, block.prefix)
        if isinstance(block, UnreadBlock):
            doubts = (f"not rebuilt: {block.reason}", *why, *lacking(seen, block.beside))
            layers.append(unmeasured(block.name, "unknown", doubts=doubts, notes=notes))
            continue
        try:
            layers.append(_spelled_layer(block, seen, options, why, notes))
        except TransferError as error:
            problems += error.problems
    if problems:
        # An invalid config concerns every block alike.
        raise TransferError("heads", dict.fromkeys(problems))
    return layers


def _spelled_layer(
    block: AttentionBlock,
    seen: Config,
    options: Options,
    why: tuple[Finding, ...],
    notes: tuple[str, ...],
) -> AttentionLayer:
    """Return the layer of a block. seen: the config as seen from it; why, notes: for all blocks."""
    sizes, softcap = head_counts(block, seen, *options.values())
    traits = Traits(
        block.embed_dim,
        sizes,
        kdim=block.kdim,
        vdim=block.vdim,
        use_bias="q.bias" in block.rows,
        use_out_bias="o.bias" in block.rows,
        add_bias_kv="bias_k" in block.rows,
        softcap=softcap,
    )
    zeros = {at.key: (at.length,) for at in block.rows.values() if at.key in block.absent}
    by_design = {block.rows["k.bias"].key} if seen.get("model_type") in KEYS_WITHOUT_BIAS else set()
    missing = (
        f"{key}: missing although sibling biases exist; using zeros"
        for key in zeros
        if key not in by_design
    )
    lacks = lacking(seen, block.beside, sizes.head_dim)
    none = tuple(f"{key}: the model has none; using zeros" for key in zeros if key in by_design)

    def rows(arrays: Arrays) -> Arrays:
        state = {}
        for name, at in block.rows.items():
            role, dot, kind = name.partition(".")
            own_name = f"{_PROJECTIONS[role]}.{kind}" if dot else name
            state[own_name] = arrays[at.key][at.start : at.stop]
        return state

    table = Layout(*rows_of(block))
    return AttentionLayer(
        *(block.name, {key: key for key in block.keys}, block.dtype, traits, rows, table),
        zeros=zeros,
        doubts=(*why, *findings("beyond-rebuild", (*lacks, *missing))),
        notes=(*notes, *none, *_note_packed(block), *_note_beside(block.beside)),
    )


def _note_packed(block: AttentionBlock) -> tuple[str, ...]:
    """Note the assumed order of packed rows: no shape shows it, and both sides assume the same."""
    key = block.rows["q.weight"].key
    is_packed = key == block.rows["k.weight"].key
    return (f"{key} read as query, key and value, one after another",) * is_packed


def _note_beside(beside: Sequence[str]) -> tuple[str, ...]:
    return (f"other tensors of the block, not in the rebuild: {_first(beside)}",) * bool(beside)


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
