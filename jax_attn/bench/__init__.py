"""Measure the speed of attention in torch and JAX, and of a user's own pair."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_attn.bench.engine.compare_speed import compare_speed
    from jax_attn.bench.results.table import markdown

__all__ = ["compare_speed", "markdown"]
_HOMES = {"compare_speed": "engine.compare_speed", "markdown": "results.table"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return resolve_name(f"{__name__}.{_HOMES[name]}:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
