"""Verdicts: whether a JAX module computes what its torch reference computes."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_attn.parity.checking.check import check, explain
    from jax_attn.parity.checking.suggestion.suggest_inputs import suggest_inputs
    from jax_attn.parity.explaining.explanation import Explanation
    from jax_attn.parity.golden.golden import Golden, load_golden
    from jax_attn.parity.golden.prepare import prepare
    from jax_attn.parity.judge.compare import Verdict
    from jax_attn.parity.judge.result import ParityError, Result
    from jax_attn.parity.pair.pair import Pair, TrainingPair
    from jax_attn.training.check_training import check_training
    from jax_attn.training.optimizers.optax_like import optax_like

__all__ = [
    "Explanation",
    "Golden",
    "Pair",
    "ParityError",
    "Result",
    "TrainingPair",
    "Verdict",
    "check",
    "check_training",
    "explain",
    "load_golden",
    "optax_like",
    "prepare",
    "suggest_inputs",
]
_HOMES = {
    "Explanation": "jax_attn.parity.explaining.explanation",
    "Golden": "jax_attn.parity.golden.golden",
    "load_golden": "jax_attn.parity.golden.golden",
    "prepare": "jax_attn.parity.golden.prepare",
    "check": "jax_attn.parity.checking.check",
    "explain": "jax_attn.parity.checking.check",
    "suggest_inputs": "jax_attn.parity.checking.suggestion.suggest_inputs",
    "check_training": "jax_attn.training.check_training",
    "optax_like": "jax_attn.training.optimizers.optax_like",
    "Pair": "jax_attn.parity.pair.pair",
    "TrainingPair": "jax_attn.parity.pair.pair",
    "Result": "jax_attn.parity.judge.result",
    "ParityError": "jax_attn.parity.judge.result",
    "Verdict": "jax_attn.parity.judge.compare",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
