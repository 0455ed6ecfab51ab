"""PyTorch's attention designs in JAX/Flax, with weights that move both ways and a proof.

Everything here is imported when first used (PEP 562), so that the command line
starts without a framework and files can be read where torch is absent.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "dot_product_attention": "jax_attn.attention",
    "attention_weights": "jax_attn.attention",
    "explain": "jax_attn.attention",
    "Mask": "jax_attn.attention",
    "Dropout": "jax_attn.attention",
    "Rotary": "jax_attn.attention",
    "GroupedQueryAttention": "jax_attn.nn",
    "MultiHeadAttention": "jax_attn.nn",
    "MultiQueryAttention": "jax_attn.nn",
    "KVCache": "jax_attn.nn",
}
_ROOMS = ("attention", "models", "nn", "parity", "transfer")

__all__ = [*_HOMES, *_ROOMS]


def __getattr__(name: str):
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
