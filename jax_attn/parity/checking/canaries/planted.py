"""The reference with another input, or with a bug planted, and whether two runs are the same."""

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
    """The same reference with some inputs others, of the dtypes that they had."""
    named = {
        name: others[name].astype(given.dtype) if name in others else given
        for name, given in named_inputs(reference).items()
    }
    args = tuple(named.pop(str(i)) for i in range(len(reference.inputs.args)))
    return reference.given(Inputs(args, named))


def settings(module: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """The attributes of each part of a module, and those of its config."""
    for part in module.modules():
        yield vars(part)
        if hasattr(config := getattr(part, "config", None), "__dict__"):
            yield vars(config)


def run_planted(reference: Reference, mode: Float64) -> Run | None:
    """Its outputs; None where it refuses what is planted, by whatever error is its own."""
    try:
        return reference.under(mode, {})
    except Exception:
        return None


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether no element differs by as much as a roundoff of float32 of b's largest.

    A check in float32 or narrower does not show less. Two float64 runs of one module come as far
    apart only after 2**29 roundings that all lean one way, or where numbers cancel to as few
    digits.
    """
    largest = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    atol = PRECISIONS["float32"].store * largest
    return np.allclose(a, b, rtol=0, atol=atol, equal_nan=True)
