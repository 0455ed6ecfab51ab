"""One attention layer of a checkpoint: rebuilt in torch and in Flax, and compared.

What is proved is the transfer: the torch side gets its rows straight from the file, the Flax
side through a table aimed at the file's own keys, and the two are checked like any pair.
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

from jax_attn.parity.checking.check import check
from jax_attn.parity.checkpoint import rebuild
from jax_attn.parity.judge.result import Result
from jax_attn.parity.run.port import x64_for
from jax_attn.transfer import LAYOUTS, Layout, Problem, TransferError, export, load
from jax_attn.transfer.families import Traits

Arrays = Mapping[str, np.ndarray]

B, T, S = 2, 13, 11
TRANSFORMS_OF_LAYERS = ("eager", "jit")


@dataclass(frozen=True)
class AttentionLayer:
    """A block that can be rebuilt.

    keys: those of the file that it reads. borrowed: key that its table has -> that of another
    block, read instead. zeros: key -> shape of what the file lacks and zeros stand for.
    rows(arrays by key) -> torch_ref's "gqa" state, without a table. layout: from the keys to
    our module. doubts: what the model does there and the rebuild does not.
    """

    name: str
    keys: tuple[str, ...]
    dtype: str
    traits: Traits
    rows: Callable[[Arrays], Arrays]
    layout: Layout
    borrowed: Mapping[str, str] = field(default_factory=dict)
    zeros: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def verify_layer(layer: AttentionLayer | Result, tensors: Arrays) -> Result:
    """The verdict on one layer: its weights bit for bit, outputs and gradients within budget.

    layer: as surveyed; a Result, of what is not rebuilt, stays as it is. tensors: the checkpoint's,
    by its own keys, of which only the layer's are read. Raises TransferError where they are not of
    the sizes that the layer's traits give.
    """
    if isinstance(layer, Result):
        return layer
    arrays = read_layer(layer, tensors)
    if infinite := [key for key, a in arrays.items() if not np.isfinite(a).all()]:
        reason = f"not rebuilt: expected finite numbers, got others in {', '.join(infinite)}"
        doubts = (reason, *layer.doubts)
        return unmeasured(layer.name, layer.dtype, doubts=doubts, notes=layer.notes)
    with x64_for(layer.dtype):
        port = flax_side(layer, arrays)
        result = compare(layer, torch_side(layer, arrays), port)
        returned = export(port, layer.layout)
    return replace(result, failures=(*result.failures, *_not_returned(arrays, returned)))


def read_layer(layer: AttentionLayer, tensors: Arrays) -> dict[str, np.ndarray]:
    """The layer's arrays by the keys that its table has."""
    arrays = {key: tensors[key] for key in layer.keys}
    arrays |= {key: tensors[other] for key, other in layer.borrowed.items()}
    dtype = jax.numpy.dtype(layer.dtype)
    return arrays | {key: np.zeros(shape, dtype) for key, shape in layer.zeros.items()}


def torch_side(layer: AttentionLayer, arrays: Arrays) -> torch.nn.Module:
    """The torch module with the rows of the file, without a transfer table."""
    dtype = getattr(torch, layer.dtype)
    module = rebuild.torch_module(layer.traits).to(dtype)
    own, rows = module.state_dict(), layer.rows(arrays)
    problems = [
        Problem("wrong shape", name, f"expected {_shape(own, name)}, got {_shape(rows, name)}")
        for name in sorted({*own, *rows})
        if _shape(own, name) != _shape(rows, name)
    ]
    if problems:
        raise TransferError(f"rebuilding {layer.name}", problems)
    module.load_state_dict({name: as_tensor(array, dtype) for name, array in rows.items()})
    return module


def flax_side(layer: AttentionLayer, arrays: Arrays) -> nnx.Module:
    """The Flax module, loaded through the table without drawing parameters first."""
    module = rebuild.flax_module(layer.traits, layer.dtype)
    load(module, arrays, layer.layout)
    return module


def compare(layer: AttentionLayer, reference: torch.nn.Module, port: nnx.Module) -> Result:
    """The verdict on the two sides of a layer, with the layer's doubts and notes."""
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
        notes=(*result.notes, *layer.notes),
        details={
            "design": "gqa",
            "variant": variant(layer.traits),
            "mask": "none, causal with padding",
            "shape": f"{N}x{K}x{H}",
            "transform": ", ".join(TRANSFORMS_OF_LAYERS),
            "keys": ", ".join((*layer.keys, *layer.borrowed.values(), *layer.zeros)),
        },
    )


def variant(traits: Traits) -> str:
    """What the block does besides plain attention: "rotary, window"; "" for nothing."""
    has = {
        "rotary": traits.rotary,
        "QK-norm": traits.qk_norm,
        "softcap": traits.softcap,
        "window": traits.window,
        "its own scale": None if _usual(traits) else traits.scale,
    }
    if traits.bias is not None:
        has[{"alibi": "ALiBi", "relative": "relative bias"}[traits.bias.kind]] = True
    return ", ".join(name for name, value in has.items() if value is not None)


def _usual(traits: Traits) -> bool:
    return traits.scale is None or math.isclose(traits.scale, traits.sizes.head_dim**-0.5)


def inputs(traits: Traits, seed: int) -> dict[str, np.ndarray]:
    """Standard normal sequences, how many keys of each count, and where they are.

    query (B, T, D); where keys and values come from elsewhere or have other widths, key
    (B, S, kdim) and value (B, S, vdim), too; lengths (B,); for rotary positions, positions (T,).
    """
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {"query": rng.standard_normal((B, T, traits.embed_dim))}
    if traits.cross or traits.widths != (traits.embed_dim, traits.embed_dim):
        kdim, vdim = traits.widths
        arrays["key"] = rng.standard_normal((B, S, kdim))
        arrays["value"] = rng.standard_normal((B, S, vdim))
    if traits.rotary is not None:
        # Far enough apart for the slowest pairs to turn: else a wrong base would go unseen.
        arrays["positions"] = 3 + 260 * np.arange(T, dtype=np.int32)
    return arrays | {"lengths": np.array([S, S // 2], np.int32)}


def _call(mask: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """How a side is called, alike in both frameworks; mask(lengths, T, S): what it masks with."""

    def call(
        module: Any,
        query: Any,
        lengths: Any,
        key: Any = None,
        value: Any = None,
        positions: Any = None,
    ) -> dict[str, Any]:
        visible = mask(lengths, query.shape[1], (query if key is None else key).shape[1])
        masked = module(query, key, value, visible, positions=positions)
        return {"output": module(query, key, value, positions=positions), "masked": masked}

    return call


def as_tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A copy of `array`, bit for bit; bfloat16, which NumPy lacks, by way of its bits."""
    if dtype is torch.bfloat16:
        return torch.from_numpy(array.copy().view(np.int16)).view(dtype)
    return torch.from_numpy(array.copy())


def _shape(arrays: Mapping[str, np.ndarray | torch.Tensor], name: str) -> str:
    return str([*arrays[name].shape]) if name in arrays else "none"


def _not_returned(arrays: Arrays, returned: Arrays) -> tuple[str, ...]:
    return tuple(
        f"weights: {key!r} does not come back from the port as it was, bit for bit"
        for key, array in arrays.items()
        if key not in returned or array.tobytes() != returned[key].tobytes()
    )


def unmeasured(
    name: str, dtype: str, *, doubts: tuple[str, ...], notes: tuple[str, ...] = ()
) -> Result:
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
