"""PyTorch's attention designs in JAX/Flax, with weights converted both ways and verified.

Everything is imported on first use (PEP 562), so that the command line starts without a framework
and files can be read without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_attn import attention, models, nn, parity, transfer
    from jax_attn.attention import (
        Dropout,
        Mask,
        Rotary,
        attention_weights,
        dot_product_attention,
        explain,
        explain_kernel,
    )
    from jax_attn.nn import GroupedQueryAttention, KVCache, MultiHeadAttention, MultiQueryAttention

__version__ = "0.1.0"

__all__ = [
    "Dropout",
    "GroupedQueryAttention",
    "KVCache",
    "Mask",
    "MultiHeadAttention",
    "MultiQueryAttention",
    "Rotary",
    "attention",
    "attention_weights",
    "dot_product_attention",
    "explain",
    "explain_kernel",
    "models",
    "nn",
    "parity",
    "transfer",
]
_ROOMS = ("attention", "models", "nn", "parity", "transfer")
_OF_NN = ("GroupedQueryAttention", "KVCache", "MultiHeadAttention", "MultiQueryAttention")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in __all__:
        home = "nn" if name in _OF_NN else "attention"
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
