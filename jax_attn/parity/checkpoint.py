"""The attention layers of a checkpoint: each rebuilt in torch and in Flax, and compared.

What is proved is the transfer: the torch side gets its rows straight from the file, the Flax
side through a table aimed at the file's own keys, and the two are checked like any pair.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

import torch_ref
from jax_attn import nn
from jax_attn.attention import Mask
from jax_attn.parity.config import Config, Sizes, lacking, seen_from, sizes
from jax_attn.parity.discover import Block, Unread, discover
from jax_attn.parity.matrix import x64_for
from jax_attn.parity.result import Result
from jax_attn.parity.verdict import check
from jax_attn.transfer import (
    LAYOUTS,
    Checkpoint,
    Layout,
    Problem,
    TransferError,
    export,
    heads,
    heads_in,
    linear,
    load,
    packed,
    row,
)

Arrays = Mapping[str, np.ndarray]

STATEMENT = "verified our rebuild of the attention weights, not the whole model"
_NO_CONFIG = "no config.json beside it: what else the model does in its attention is not known"

B, T, S = 2, 13, 11
TRANSFORMS = ("eager", "jit")
_SHOWN = 8

# name of a part -> torch's name for it, the Flax path, the steps between the two
_PLACES = {
    "q.weight": ("q_proj.weight", "q_proj.kernel", (linear, heads)),
    "k.weight": ("k_proj.weight", "k_proj.kernel", (linear, heads)),
    "v.weight": ("v_proj.weight", "v_proj.kernel", (linear, heads)),
    "o.weight": ("out_proj.weight", "out_proj.kernel", (linear, heads_in)),
    "q.bias": ("q_proj.bias", "q_proj.bias", (heads,)),
    "k.bias": ("k_proj.bias", "k_proj.bias", (heads,)),
    "v.bias": ("v_proj.bias", "v_proj.bias", (heads,)),
    "o.bias": ("out_proj.bias", "out_proj.bias", ()),
}


@dataclass(frozen=True)
class Layer:
    """A block that can be rebuilt. doubts: what the model does there and the rebuild does not."""

    block: Block
    sizes: Sizes
    doubts: tuple[str, ...]
    notes: tuple[str, ...]


def survey(
    checkpoint: Checkpoint,
    config: Config | None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
) -> list[Layer | Result]:
    """The layers to verify, and a Result for each block that is not rebuilt.

    Reads no tensor. Raises UnknownHeadsError; TransferError where there is no attention, and
    with everything that contradicts itself.
    """
    specs = {key: checkpoint.describe(key) for key in checkpoint}
    known = config or {}
    found = discover(specs, str(known.get("model_type", "")))
    if not found:
        text = f"expected attention, got {len(specs)} tensors that spell none: {_first([*specs])}"
        raise TransferError("finding attention", [Problem("file", str(checkpoint.path), text)])
    notes = (STATEMENT,) if config is not None else (STATEMENT, _NO_CONFIG)
    surveyed: list[Layer | Result] = []
    problems: list[Problem] = []
    for block in found:
        seen = seen_from(known, block.prefix)
        if isinstance(block, Unread):
            surveyed.append(_not_rebuilt(block, seen, notes))
            continue
        try:
            made = sizes(block, seen, num_heads, num_kv_heads)
        except TransferError as error:
            problems += error.problems
            continue
        doubts = (
            *lacking(seen, block.beside, made.head_dim),
            *(f"{key} is not there, others are: zeros stand for it" for key in block.absent),
        )
        surveyed.append(Layer(block, made, doubts, (*notes, *_packed(block), *_beside(block))))
    if problems:
        # What the config says wrong, it says to every block.
        raise TransferError("heads", dict.fromkeys(problems))
    return surveyed


def verify(layer: Layer, tensors: Mapping[str, np.ndarray]) -> Result:
    """The verdict on one layer: its weights bit for bit, outputs and gradients within budget.

    tensors: the checkpoint's, by its own keys, of which only the layer's are read.
    """
    block = layer.block
    arrays = {key: tensors[key] for key in block.keys}
    infinite = [key for key, a in arrays.items() if not np.isfinite(a).all()]
    if infinite:
        reason = f"not rebuilt: expected finite numbers, got others in {', '.join(infinite)}"
        return _unmeasured(block.name, block.dtype, (reason, *layer.doubts), layer.notes)
    for part in block.parts.values():
        if part.key in block.absent:
            arrays[part.key] = np.zeros(part.rows, jnp.dtype(block.dtype))
    seed = zlib.crc32(block.name.encode())
    with x64_for(block.dtype):
        layout = table(block)
        port = flax_side(layer, arrays, layout)
        result = check(
            torch_side(layer, arrays),
            port,
            inputs(block, seed),
            layout=LAYOUTS["gqa"],
            reference_call=_torch_call,
            port_call=_flax_call,
            dtype=block.dtype,
            transforms=TRANSFORMS,
            seed=seed,
        )
        returned = export(port, layout)
    N, K, H, softcap = layer.sizes
    return replace(
        result,
        name=block.name,
        failures=(*result.failures, *_not_returned(arrays, returned)),
        doubts=(*result.doubts, *layer.doubts),
        notes=(*result.notes, *layer.notes),
        details={
            "design": "gqa",
            "variant": "softcap" if softcap else "",
            "mask": "none, causal with padding",
            "shape": f"{N}x{K}x{H}",
            "transform": ", ".join(TRANSFORMS),
            "keys": ", ".join(block.keys),
        },
    )


def table(block: Block) -> Layout:
    """The transfer table between the block's own keys and the Flax module."""
    at: dict[str, list[str]] = {}
    for name, part in block.parts.items():
        at.setdefault(part.key, []).append(name)
    return Layout(*(_row(key, names) for key, names in at.items()))


def _row(key: str, names: list[str]):
    paths, steps = [_PLACES[name][1] for name in names], _PLACES[names[0]][2]
    return row(key, paths, *steps) if len(names) == 1 else row(key, paths, packed, *steps)


def torch_side(layer: Layer, arrays: Arrays) -> torch.nn.Module:
    """The torch module with the file's rows as they lie there: no table has a say."""
    block, (N, K, H, softcap) = layer.block, layer.sizes
    module = torch_ref.DESIGNS["gqa"](
        block.embed_dim,
        N,
        K,
        head_dim=H,
        kdim=block.kdim,
        vdim=block.vdim,
        bias="q.bias" in block.parts,
        out_bias="o.bias" in block.parts,
        softcap=softcap,
    )
    dtype = getattr(torch, block.dtype)
    state = {
        _PLACES[name][0]: _tensor(arrays[part.key], dtype)[part.start : part.stop]
        for name, part in block.parts.items()
    }
    module.to(dtype).load_state_dict(state)
    return module.eval()


def flax_side(layer: Layer, arrays: Arrays, layout: Layout) -> nnx.Module:
    """The Flax module, loaded through the table: no parameter is drawn to be written over."""
    block, (N, K, H, softcap) = layer.block, layer.sizes
    options = {
        "head_dim": H,
        "kdim": block.kdim,
        "vdim": block.vdim,
        "use_bias": "q.bias" in block.parts,
        "use_out_bias": "o.bias" in block.parts,
        "softcap": softcap,
        "dtype": block.dtype,
        "param_dtype": block.dtype,
    }
    module = nnx.eval_shape(
        lambda: nn.GroupedQueryAttention(block.embed_dim, N, K, **options, rngs=nnx.Rngs(0))
    )
    module.eval()
    load(module, arrays, layout)
    return module


def inputs(block: Block, seed: int) -> dict[str, np.ndarray]:
    """Standard normal sequences, and how many keys of each count.

    query (B, T, D); where keys and values have other widths, key (B, S, kdim) and value
    (B, S, vdim), too; lengths (B,).
    """
    rng = np.random.default_rng(seed)
    given = {"query": rng.standard_normal((B, T, block.embed_dim))}
    if (block.kdim, block.vdim) != (block.embed_dim, block.embed_dim):
        given["key"] = rng.standard_normal((B, S, block.kdim))
        given["value"] = rng.standard_normal((B, S, block.vdim))
    return given | {"lengths": np.array([S, S // 2], np.int32)}


def _torch_call(module, query, lengths, key=None, value=None):
    keys = query.shape[1] if key is None else key.shape[1]
    counted = (torch.arange(keys)[None] < lengths[:, None])[:, None, None]
    masked = module(query, key, value, counted, is_causal=True)
    return {"output": module(query, key, value), "masked": masked}


def _flax_call(module, query, lengths, key=None, value=None):
    masked = module(query, key, value, Mask.lengths(lengths), is_causal=True)
    return {"output": module(query, key, value), "masked": masked}


def _tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A copy of `array`, bit for bit; bfloat16, which NumPy lacks, by way of its bits."""
    if dtype is torch.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(dtype)
    return torch.from_numpy(array.copy())


def _not_returned(given: Arrays, returned: Arrays) -> tuple[str, ...]:
    return tuple(
        f"weights: {key!r} does not come back from the port as it was, bit for bit"
        for key in given
        if key not in returned or given[key].tobytes() != returned[key].tobytes()
    )


def _packed(block: Block) -> tuple[str, ...]:
    """No shape tells the order, which both sides take from the spelling."""
    key = block.parts["q.weight"].key
    is_packed = key == block.parts["k.weight"].key
    return (f"{key} read as query, key and value, one after another",) * is_packed


def _beside(block: Block) -> tuple[str, ...]:
    return (f"beside it, and no part of the rebuild: {_first(block.beside)}",) * bool(block.beside)


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


def _not_rebuilt(block: Unread, config: Config, notes: tuple[str, ...]) -> Result:
    doubts = (f"not rebuilt: {block.reason}", *lacking(config, block.beside))
    return _unmeasured(block.name, "unknown", doubts, notes)


def _unmeasured(name: str, dtype: str, doubts: tuple[str, ...], notes: tuple[str, ...]) -> Result:
    """Nothing was run: no tensor, no level, INCONCLUSIVE."""
    return Result(
        dtype=dtype,
        backend=jax.default_backend(),
        tensors=(),
        doubts=doubts,
        notes=notes,
        level="not run",
        name=name,
        details={"design": "unknown", "variant": "", "mask": "", "shape": "", "transform": ""},
    )
