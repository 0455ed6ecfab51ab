"""Call each side: mask kind -> `call(module, **inputs) -> {name: array}`.

Both sides get the same numbers. Each expresses in its own terms what they mask, and neither uses
the meaning in `masks`, which is the oracle's.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import torch

from jax_attn.attention import Mask
from jax_attn.selfcheck.matrix.masks import DROPPED, WINDOW

# For modules and arrays of either framework.
Named = dict[str, Any]
Call = Callable[..., Named]
Bind = Callable[[str], Call]
_ARRAYS = ("x", "query", "key", "value")


def torch_allowed(
    kind: str, masks: Mapping[str, torch.Tensor], T: int, S: int
) -> torch.Tensor | None:
    """Return booleans, True = attend, rank 2 or 4, or None; written independently of `masks`."""
    match kind:
        case "causal":
            return torch.ones(T, S, dtype=torch.bool).tril()
        case "window":
            band = torch.ones(T, S, dtype=torch.bool)
            return band.triu(-WINDOW[0]).tril(WINDOW[1])
        case "sliding":
            return torch.ones(T, S, dtype=torch.bool).tril().triu(-WINDOW[0])
        case "padding":
            return (torch.arange(S)[None] < masks["lengths"][:, None])[:, None, None]
        case "causal_padding":
            padding = torch.arange(S)[None] < masks["lengths"][:, None]
            return torch.ones(T, S, dtype=torch.bool).tril() & padding[:, None, None]
        case "zero_one":
            return masks["zero_one"][:, None] == 1
        case "per_head" | "empty_row":
            return masks["allowed"]
    return None


def jax_mask(kind: str, masks: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Return the port's keywords: a structured mask if there is structure, else an array."""
    match kind:
        case "causal":
            return {"is_causal": True}
        case "window":
            return {"mask": Mask.window(*WINDOW)}
        case "sliding":
            return {"mask": Mask.window(WINDOW[0], 0)}
        case "padding":
            return {"mask": Mask.lengths(masks["lengths"])}
        case "causal_padding":
            return {"mask": Mask.lengths(masks["lengths"]), "is_causal": True}
        case "zero_one":
            return {"mask": Mask.from_zero_one(masks["zero_one"])}
        case "per_head" | "empty_row":
            return {"mask": masks["allowed"]}
        case "bias":
            return {"bias": masks["bias"]}
    return {}


def bare(kind: str) -> Call:
    """Return the call of a module that takes only x."""
    return lambda module, x: {"output": module(x)}


def zero_one_4d(kind: str) -> Call:
    def call(module: Any, x: Any, **masks: Any) -> Named:
        allowed = torch_allowed(kind, masks, x.shape[1], x.shape[1])
        return {"output": module(x, None if allowed is None else allowed.int())}

    return call


def zero_one_3d(kind: str) -> Call:
    def call(module: Any, x: Any, **masks: Any) -> Named:
        B, T, _ = x.shape
        allowed = torch_allowed(kind, masks, T, T)
        if allowed is not None:
            allowed = (allowed if allowed.ndim == 2 else allowed[:, 0]).expand(B, T, T).int()
        return dict(zip(("output", "weights"), module(x, allowed), strict=True))

    return call


def torch_mha(*, weights: str = "", sequence_first: bool = False) -> Bind:
    """Return the calls of torch's module, by mask kind.

    weights: "", "each head" or "mean"; torch takes a different path for each.
    """

    def bind(kind: str) -> Call:
        def call(module: Any, query: Any, key: Any, value: Any, **masks: Any) -> Named:
            (B, T, _), S, N = query.shape, key.shape[1], module.num_heads
            if sequence_first:
                query, key, value = (a.transpose(0, 1) for a in (query, key, value))
            forbidden, padded = None, None
            if kind in ("padding", "causal_padding"):
                padded = torch.arange(S)[None] >= masks["lengths"][:, None]
                causal = torch.ones(T, S, dtype=torch.bool).tril()
                forbidden = ~causal if kind == "causal_padding" else None
            elif kind == "bias":
                forbidden = masks["bias"].reshape(B * N, T, S)
            elif (allowed := torch_allowed(kind, masks, T, S)) is not None:
                forbidden = ~allowed
                if allowed.ndim == 4:
                    forbidden = forbidden.expand(B, N, T, S).reshape(B * N, T, S)
            output, attended = module(
                query,
                key,
                value,
                attn_mask=forbidden,
                key_padding_mask=padded,
                need_weights=bool(weights),
                average_attn_weights=weights == "mean",
            )
            output = output.transpose(0, 1) if sequence_first else output
            return {"output": output} | ({"weights": attended} if weights else {})

        return call

    return bind


def gqa(kind: str) -> Call:
    def call(module: Any, query: Any, key: Any, value: Any, **masks: Any) -> Named:
        if kind == "bias":
            keywords = {"bias": masks["bias"]}
        elif kind == "causal":
            keywords = {"is_causal": True}
        else:
            keywords = {"mask": torch_allowed(kind, masks, query.shape[1], key.shape[1])}
        weights = module.attention_weights(query, key, **keywords)
        return {"output": module(query, key, value, **keywords), "weights": weights}

    return call


class _Kept(torch.nn.Module):
    """Dropout with a given draw."""

    def __init__(self, keep: torch.Tensor):
        super().__init__()
        self.keep = keep

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        return weights * self.keep / (1 - DROPPED)


def gqa_dropping(kind: str) -> Call:
    def call(module: Any, query: Any, key: Any, value: Any, keep: Any) -> Named:
        module.dropout = _Kept(keep)  # each call gets its own copy of the module
        return {"output": module(query, key, value)}

    return call


def port_dropping(kind: str) -> Call:
    def call(module: Any, query: Any, key: Any, value: Any, keep: Any) -> Named:
        return {"output": module(query, key, value, keep=keep, deterministic=False)}

    return call


def port(*, weights: str = "") -> Bind:
    """Return the calls of a port on x, or on query, key and value; weights: as for `torch_mha`."""

    def bind(kind: str) -> Call:
        def call(module: Any, **inputs: Any) -> Named:
            arrays = [inputs.pop(name) for name in _ARRAYS if name in inputs]
            keywords = jax_mask(kind, inputs)
            named = {"output": module(*arrays, **keywords)}
            if weights:
                named["weights"] = module.attention_weights(*arrays[:2], **keywords)
            if weights == "mean":
                named["weights"] = named["weights"].mean(axis=1)
            return named

        return call

    return bind
