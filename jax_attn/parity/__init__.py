"""The verdict: whether a JAX module computes what its torch reference does."""

import importlib

_HOMES = {
    "check": "jax_attn.parity.checking.check",
    "check_training": "jax_attn.parity.training.check_training",
    "optax_like": "jax_attn.parity.training.optimizers.optax_like",
    "Result": "jax_attn.parity.judge.result",
    "ParityError": "jax_attn.parity.judge.result",
    "Verdict": "jax_attn.parity.judge.compare",
}

__all__ = ["ParityError", "Result", "Verdict", "check", "check_training", "optax_like"]


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
