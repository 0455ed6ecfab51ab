"""Rebuild one attention layer of a checkpoint in torch and in Flax, and compare them.

This proves the transfer: the torch side gets its rows straight from the file, the Flax side
through a table for the file's own keys, and the two are checked like any pair.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

from jax_attn.families.traits import Traits
from jax_attn.parity.checking.check import check
from jax_attn.parity.judge.finding import Finding, findings
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.port import x64_for
from jax_attn.porting.port.plan import PortPlan
from jax_attn.porting.verify import rebuild
from jax_attn.transfer import LAYOUTS, Layout, Problem, TransferError, export, flatten, load, row
from jax_attn.transfer.arrays import as_numpy, as_torch, recast

Arrays = Mapping[str, np.ndarray]

B, T, S = 2, 13, 11
TRANSFORMS_OF_LAYERS = ("eager", "jit")


@dataclass(frozen=True)
class AttentionLayer:
    """A block that can be rebuilt.

    keys: key of its table -> key in the file, which may belong to another block. zeros: key ->
    shape of tensors that the file lacks, for which zeros are used. rows: (arrays by key) ->
    torch_ref's "gqa" state, without a table. layout: the table from the keys to our module. doubts:
    what the result does not cover, such as what the model does and the rebuild does not.
    """

    name: str
    keys: Mapping[str, str]
    dtype: str
    traits: Traits
    rows: Callable[[Arrays], Arrays]
    layout: Layout
    zeros: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    doubts: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


Surveyed = AttentionLayer | Result
"""A layer to verify, or a Result that says why it is not rebuilt."""


def verify_layer(layer: Surveyed, tensors: Arrays, *, explain: bool = False) -> Result:
    """Verify one layer: its weights bit for bit, outputs and gradients within budget.

    layer: as surveyed; a Result, for a layer that is not rebuilt, is returned unchanged. tensors:
    the checkpoint's, by its own keys; only the layer's are read. explain: add an explanation to a
    result that does not pass. Raises TransferError if tensors do not have the sizes that the
    layer's traits give.
    """
    if isinstance(layer, Result):
        return layer
    arrays = read_layer(layer, tensors)
    if infinite := [key for key, a in arrays.items() if not np.isfinite(a).all()]:
        return _not_rebuilt(layer, f"expected finite numbers, got others in {', '.join(infinite)}")
    with x64_for(layer.dtype):
        port = flax_side(layer, arrays)
        result = compare(layer, torch_side(layer, arrays), port)
        # Do not keep the modules of one layer while the next ones are verified.
        result = result.explained() if explain else replace(result, explainer=None)
        returned = export(port, layer.layout)
    return replace(result, failures=(*result.failures, *_not_returned(arrays, returned)))


def verify_port(
    layer: Surveyed, source: Mapping[str, Any], written: Mapping[str, Any], plan: PortPlan
) -> Result:
    """Verify a layer that a port wrote: torch on the source's own rows, Flax on the written arrays.

    The torch side does not use the port's table, so that a table that transposes a square weight,
    or swaps query and key, is detected.
    """
    if isinstance(layer, Result):
        return layer
    paths, unclear = _written_at(layer, plan)
    if unclear:
        return _not_rebuilt(layer, unclear)
    arrays = {path: as_numpy(written[at], at) for path, at in paths.items()}
    rows = read_layer(layer, source)
    if plan.dtype is not None:
        layer = replace(layer, dtype=plan.dtype)
        rows = {key: recast(array, plan.dtype) for key, array in rows.items()}
    if not all(np.isfinite(array).all() for array in rows.values()):
        return _not_rebuilt(layer, "expected finite numbers")
    with x64_for(layer.dtype):
        port = rebuild.flax_module(layer.traits, layer.dtype)
        shapes = {path: array.shape for path, array in flatten(port).items()}
        arrays |= {path: np.zeros(shapes[path], layer.dtype) for path in _of_zeros(layer)}
        try:
            reference = torch_side(layer, rows)
            load(port, arrays, Layout(*(row(path, path) for path in arrays)))
        except TransferError as error:
            return replace(
                _not_rebuilt(layer, "of other sizes"),
                failures=findings("weights-differ", [str(error)]),
            )
        return replace(compare(layer, reference, port), explainer=None)


def read_layer(layer: AttentionLayer, tensors: Arrays) -> dict[str, np.ndarray]:
    """Return the layer's arrays by the keys of its table."""
    arrays = {key: tensors[in_file] for key, in_file in layer.keys.items()}
    dtype = jax.numpy.dtype(layer.dtype)
    return arrays | {key: np.zeros(shape, dtype) for key, shape in layer.zeros.items()}


def torch_side(layer: AttentionLayer, arrays: Arrays) -> torch.nn.Module:
    """Build the torch module with the rows of the file, without a transfer table."""
    module = rebuild.torch_module(layer.traits).to(getattr(torch, layer.dtype))
    own, rows = module.state_dict(), layer.rows(arrays)
    problems = [
        Problem("wrong shape", name, f"expected {_shape(own, name)}, got {_shape(rows, name)}")
        for name in sorted({*own, *rows})
        if _shape(own, name) != _shape(rows, name)
    ]
    if problems:
        raise TransferError(f"rebuilding {layer.name}", problems)
    module.load_state_dict({name: as_torch(array.copy()) for name, array in rows.items()})
    return module


def flax_side(layer: AttentionLayer, arrays: Arrays) -> nnx.Module:
    """Build the Flax module, loaded through the table without drawing parameters first."""
    module = rebuild.flax_module(layer.traits, layer.dtype)
    load(module, arrays, layer.layout)
    return module


def compare(layer: AttentionLayer, reference: torch.nn.Module, port: nnx.Module) -> Result:
    """Check the two sides of a layer; the result includes the layer's doubts and notes."""
    seed = zlib.crc32(layer.name.encode())
    N, K, H = layer.traits.sizes
    causal = replace(layer.traits, is_causal=True)
    result = check(
        reference,
        port,
        inputs(layer.traits, seed),
        layout=LAYOUTS["gqa"],
        reference_call=_call(partial(rebuild.torch_mask, causal)),
        port_call=_call(lambda lengths, T, S: rebuild.flax_mask(causal, lengths)),
        dtype=layer.dtype,
        transforms=TRANSFORMS_OF_LAYERS,
        seed=seed,
    )
    return replace(
        result,
        name=layer.name,
        doubts=(*result.doubts, *layer.doubts),
        notes=(*result.notes, *findings("about-checkpoint", layer.notes)),
        details={
            "design": "gqa",
            "variant": variant(layer.traits),
            "mask": "none, causal with padding",
            "shape": f"{N}x{K}x{H}",
            "transform": ", ".join(TRANSFORMS_OF_LAYERS),
            "keys": ", ".join((*layer.keys.values(), *layer.zeros)),
        },
    )


def variant(traits: Traits) -> str:
    """Return the block's features beyond plain attention, such as "rotary, window", or ""."""
    scale, bias = traits.scale, traits.bias and traits.bias.kind
    has = {
        "rotary": traits.rotary is not None,
        "QK-norm": traits.qk_norm is not None,
        "softcap": traits.softcap is not None,
        "a learned key": traits.add_bias_kv,
        "sinks": traits.sinks,
        "window": traits.window is not None,
        "its own scale": scale and not math.isclose(scale, traits.sizes.head_dim**-0.5),
        "ALiBi": bias == "alibi",
        "relative bias": bias == "relative",
    }
    return ", ".join(name for name, is_there in has.items() if is_there)


def inputs(traits: Traits, seed: int) -> dict[str, np.ndarray]:
    """Draw standard normal sequences, with their lengths and, for rotary positions, positions.

    query (B, T, D); for cross-attention or other widths of keys and values, also key (B, S, kdim)
    and value (B, S, vdim); lengths (B,), the number of valid keys; positions (T,).
    """
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {"query": rng.standard_normal((B, T, traits.embed_dim))}
    if traits.cross or traits.widths != (traits.embed_dim, traits.embed_dim):
        kdim, vdim = traits.widths
        arrays["key"] = rng.standard_normal((B, S, kdim))
        arrays["value"] = rng.standard_normal((B, S, vdim))
    if traits.rotary is not None:
        # Far enough apart for the slowest pairs to turn; else a wrong base would go unseen.
        arrays["positions"] = 3 + 260 * np.arange(T, dtype=np.int32)
    return arrays | {"lengths": np.array([S, S // 2], np.int32)}


def _call(mask: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Return a call of either side, without a mask and with mask(lengths, T, S)."""

    def call(module: Any, query: Any, lengths: Any, **others: Any) -> dict[str, Any]:
        visible = mask(lengths, query.shape[1], others.get("key", query).shape[1])
        masked = module(query, mask=visible, **others)
        return {"output": module(query, **others), "masked": masked}

    return call


def _shape(arrays: Mapping[str, np.ndarray | torch.Tensor], name: str) -> str:
    return str([*arrays[name].shape]) if name in arrays else "none"


def _not_returned(arrays: Arrays, returned: Arrays) -> tuple[Finding, ...]:
    other = (
        f"weights: {key!r} is not bit-identical after reading the port back"
        for key, array in arrays.items()
        if key not in returned or array.tobytes() != returned[key].tobytes()
    )
    return findings("weights-differ", other)


def unmeasured(
    name: str, dtype: str, *, doubts: tuple[str, ...], notes: tuple[str, ...] = ()
) -> Result:
    """Return an INCONCLUSIVE result of a check that did not run, without tensors."""
    return Result(
        dtype=dtype,
        backend=jax.default_backend(),
        tensors=(),
        doubts=findings("not-rebuilt", doubts),
        notes=findings("about-checkpoint", notes),
        level="not run",
        name=name,
        details={"design": "unknown", "variant": "", "mask": "", "shape": "", "transform": ""},
    )


def _not_rebuilt(layer: AttentionLayer, why: str) -> Result:
    doubts = (f"not rebuilt: {why}", *layer.doubts)
    return unmeasured(layer.name, layer.dtype, doubts=doubts, notes=layer.notes)


def _written_at(layer: AttentionLayer, plan: PortPlan) -> tuple[dict[str, str], str]:
    """Find where each array of the layer's module was written, by its name, not by a table.

    Returns path in our module -> written path, and why that is unclear, or "".
    """
    keys = set(layer.keys.values())
    moves = (move for move in plan.moves if not keys.isdisjoint(move.row.keys))
    written = [path for move in moves for path in move.row.paths]
    with x64_for(layer.dtype):
        needed = flatten(rebuild.flax_module(layer.traits, layer.dtype))
    written_at = {}
    for path in needed.keys() - _of_zeros(layer):
        candidates = [w for w in written if f".{w}".endswith(f".{path}")]
        if len(candidates) != 1:
            return {}, f"expected one path that ends in {path}, got {candidates}"
        (written_at[path],) = candidates
    return written_at, ""


def _of_zeros(layer: AttentionLayer) -> set[str]:
    """Return the paths in our module of tensors that the file lacks, for which zeros are used."""
    rows = (r for group in layer.layout.groups for r in group.rows)
    return {path for r in rows if not layer.zeros.keys().isdisjoint(r.keys) for path in r.paths}
