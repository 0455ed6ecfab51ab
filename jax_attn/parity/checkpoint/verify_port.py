"""What a port wrote against its source: attention in torch on the source's own rows, in Flax on
the arrays as they were written.

The torch side does not use the port's table, so that a table that transposes a square weight, or
swaps query and key, is detected.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_attn.parity.checkpoint import rebuild
from jax_attn.parity.checkpoint.layer import (
    AttentionLayer,
    compare,
    read_layer,
    torch_side,
    unmeasured,
)
from jax_attn.parity.checkpoint.survey import survey
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.port import x64_for
from jax_attn.transfer import Layout, TransferError, as_numpy, flatten, load, row
from jax_attn.transfer.inspect.config import Config, UnknownHeadsError
from jax_attn.transfer.port.files import LazyTensors
from jax_attn.transfer.port.plan import PortPlan
from jax_attn.transfer.port.values import recast
from jax_attn.transfer.table.steps import HeadSizes

STATEMENT = "verified the attention weights that were written, not the whole model"


@dataclass(frozen=True)
class Ported:
    """A layer, and where each array of our module was written; paths: our module's to those."""

    layer: AttentionLayer
    paths: Mapping[str, str]


def survey_port(
    source: LazyTensors, config: Config | None, plan: PortPlan, sizes: HeadSizes | None
) -> list[Ported | Result]:
    """The attention that a port carried, and a Result for each block that is not rebuilt.

    sizes: as the port has them, where no config says.
    """
    N, K, _ = sizes or (None, None, None)
    try:
        layers = survey(source, config, N, K)
    except (UnknownHeadsError, TransferError) as error:
        doubts = (f"not rebuilt: {error}",)
        return [unmeasured("attention", "unknown", doubts=doubts, notes=(STATEMENT,))]
    return [x if isinstance(x, Result) else _located(x, plan) for x in layers]


def verify_port(
    ported: Ported | Result, source: Mapping[str, Any], written: Mapping[str, Any], plan: PortPlan
) -> Result:
    """The verdict on one block: its weights bit for bit, outputs and gradients within budget."""
    if isinstance(ported, Result):
        return ported
    layer = ported.layer
    arrays = {path: as_numpy(written[at], at) for path, at in ported.paths.items()}
    rows = read_layer(layer, source)
    if plan.dtype is not None:
        layer = replace(layer, dtype=plan.dtype)
        rows = {key: recast(array, plan.dtype) for key, array in rows.items()}
    if not all(np.isfinite(array).all() for array in rows.values()):
        return _doubted(layer, "expected finite numbers")
    with x64_for(layer.dtype):
        port = rebuild.flax_module(layer.traits, layer.dtype)
        try:
            reference = torch_side(layer, rows)
            load(port, arrays, Layout(*(row(path, path) for path in arrays)))
        except TransferError as error:
            return replace(_doubted(layer, "of other sizes"), failures=(str(error),))
        return compare(layer, reference, port)


def _located(layer: AttentionLayer, plan: PortPlan) -> Ported | Result:
    """Where the arrays of a layer's module were written, by their names, not by a table."""
    keys = {*layer.keys, *layer.borrowed.values()}
    written = [
        path for move in plan.moves if not keys.isdisjoint(move.row.keys) for path in move.row.paths
    ]
    with x64_for(layer.dtype):
        needed = flatten(rebuild.flax_module(layer.traits, layer.dtype))
    ends = {path: [w for w in written if f".{w}".endswith(f".{path}")] for path in needed}
    for path, candidates in ends.items():
        if len(candidates) != 1:
            return _doubted(layer, f"expected one path that ends in {path}, got {candidates}")
    return Ported(layer, {path: candidates[0] for path, candidates in ends.items()})


def _doubted(layer: AttentionLayer, why: str) -> Result:
    doubts = (f"not rebuilt: {why}", *layer.doubts)
    return unmeasured(layer.name, layer.dtype, doubts=doubts, notes=layer.notes)
