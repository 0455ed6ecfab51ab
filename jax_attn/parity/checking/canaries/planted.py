"""The reference with another input, or with a bug planted, and whether two runs are the same."""

from dataclasses import replace

import numpy as np

from jax_attn.parity.run.float64_mode import Float64
from jax_attn.parity.run.inputs_and_runs import Inputs, Run
from jax_attn.parity.run.reference import Reference


def named_inputs(reference: Reference) -> dict[str, np.ndarray]:
    inputs = reference.inputs
    return inputs.named(inputs.args, inputs.kwargs)


def with_input(reference: Reference, name: str, value: np.ndarray) -> Reference:
    """The same reference with one input another."""
    inputs = reference.inputs
    value = value.astype(named_inputs(reference)[name].dtype)
    args = tuple(value if str(i) == name else a for i, a in enumerate(inputs.args))
    kwargs = {k: value if k == name else a for k, a in inputs.kwargs.items()}
    return replace(reference, inputs=Inputs(args, kwargs))


def run_planted(reference: Reference, mode: Float64) -> Run | None:
    """Its outputs; None where it refuses what is planted, by whatever error is its own."""
    try:
        return reference.under(mode, {})
    except Exception:
        return None


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """To half of float64's digits of b's largest: roundings take far fewer, a bug far more."""
    largest = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    return np.allclose(a, b, rtol=0, atol=np.finfo(np.float64).eps ** 0.5 * largest, equal_nan=True)
