"""The reference with another input, or with a bug planted, and whether two runs are the same."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from jax_attn.parity.run.float64_mode import Float64
from jax_attn.parity.run.inputs_and_runs import Inputs, Run
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
    """To half of float64's digits of b's largest: 2**-26.

    What is less than a roundoff of float32, 2**-24, no check in float32 or narrower shows; and two
    float64 runs of one module are as far apart only after 2**26 roundings that all lean one way, or
    where numbers cancel to as few digits.
    """
    largest = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    return np.allclose(a, b, rtol=0, atol=np.finfo(np.float64).eps ** 0.5 * largest, equal_nan=True)
