"""Write the source of an NNX module that computes what a torch module computes, and prove it."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_attn.translate.proof import prove
    from jax_attn.translate.tracing.problems import TranslationError, Unsupported
    from jax_attn.translate.translation import Translation, translate

__all__ = ["Translation", "TranslationError", "Unsupported", "prove", "translate"]
_HOMES = {
    "Translation": "jax_attn.translate.translation",
    "TranslationError": "jax_attn.translate.tracing.problems",
    "Unsupported": "jax_attn.translate.tracing.problems",
    "prove": "jax_attn.translate.proof",
    "translate": "jax_attn.translate.translation",
}

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
