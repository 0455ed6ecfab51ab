"""Run the reference with other inputs, or with a bug planted, and compare runs."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from jax_attn.parity.judge.budget import PRECISIONS
from jax_attn.parity.run.inputs_and_runs import Inputs, Run
from jax_attn.parity.run.modes.float64_mode import Float64
from jax_attn.parity.run.reference import Reference


def named_inputs(reference: Reference) -> dict[str, np.ndarray]:
    inputs = reference.inputs
    return inputs.named(inputs.args, inputs.kwargs)


def with_inputs(reference: Reference, others: Mapping[str, np.ndarray]) -> Reference:
    """Return the reference with some inputs replaced, cast to the dtypes that they had."""
    named = {
        name: others[name].astype(given.dtype) if name in others else given
        for name, given in named_inputs(reference).items()
    }
    args = tuple(named.pop(str(i)) for i in range(len(reference.inputs.args)))
    return reference.given(Inputs(args, named))


def settings(module: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the attributes of each part of a module, and those of its config."""
    for part in module.modules():
        yield vars(part)
        if hasattr(config := getattr(part, "config", None), "__dict__"):
            yield vars(config)


def run_planted(reference: Reference, mode: Float64) -> Run | None:
    """Run the reference forward under a mode; return None if it raises any error."""
    try:
        return reference.under(mode, {})
    except Exception:
        return None


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether every element differs by at most a float32 roundoff of b's largest element.

    A check in float32 or narrower does not show smaller differences. Two float64 runs of one module
    differ by that much only after 2**29 roundings in the same direction, or by cancellation of
    as many digits.
    """
    largest = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    atol = PRECISIONS["float32"].store * largest
    return np.allclose(a, b, rtol=0, atol=atol, equal_nan=True)
