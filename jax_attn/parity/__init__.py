"""Verdicts: whether a JAX module computes what its torch reference computes."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_attn.parity.checking.check import check
    from jax_attn.parity.checking.explain import explain
    from jax_attn.parity.checking.suggestion.suggest_inputs import suggest_inputs
    from jax_attn.parity.explaining.explanation import Explanation
    from jax_attn.parity.judge.compare import Verdict
    from jax_attn.parity.judge.result import ParityError, Result
    from jax_attn.parity.training.check_training import check_training
    from jax_attn.parity.training.optimizers.optax_like import optax_like

__all__ = [
    "Explanation",
    "ParityError",
    "Result",
    "Verdict",
    "check",
    "check_training",
    "explain",
    "optax_like",
    "suggest_inputs",
]
_HOMES = {
    "explain": "checking.explain",
    "Explanation": "explaining.explanation",
    "check": "checking.check",
    "suggest_inputs": "checking.suggestion.suggest_inputs",
    "check_training": "training.check_training",
    "optax_like": "training.optimizers.optax_like",
    "Result": "judge.result",
    "ParityError": "judge.result",
    "Verdict": "judge.compare",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
