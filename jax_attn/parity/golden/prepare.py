"""Prepare a reference where torch is, so that ports can be judged where it is not."""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from jax_attn.environment import PACKAGES, free_memory, version
from jax_attn.parity.checking.arguments import reference_problems
from jax_attn.parity.checking.fixed import expect_none
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.checking.preparing import prepare_module
from jax_attn.parity.checking.reference_side import TAPS
from jax_attn.parity.explaining.captured import Captured, captured
from jax_attn.parity.explaining.taps.torch_taps import torch_taps
from jax_attn.parity.explaining.wanted import cotangents_of, floating
from jax_attn.parity.golden.golden import Golden
from jax_attn.parity.run.inputs_and_runs import Inputs, float_dtype


def prepare(
    reference: torch.nn.Module,
    inputs: tuple[np.ndarray, ...] | Mapping[str, np.ndarray],
    *,
    reference_call: Callable[..., Any] | None = None,
    dtype: str = "float32",
    gradients: bool = True,
    seed: int = 0,
    parameters: str | Sequence[str] | None = None,
    taps: bool = False,
) -> Golden:
    """Prepare the reference's side of a check, so that ports can be judged without it.

    `check(prepare(reference, inputs), port)` gives the verdict and the numbers of
    `check(reference, port, inputs)`, bit for bit. It takes as long as a check whose port fails,
    because everything is computed that any port may need.

    Args:
      reference, inputs, reference_call, dtype, gradients, seed, parameters: as for `check`. They
        are fixed from here on; transforms, layout, mesh and strictness are the check's.
      taps: whether to hold every tensor that the reference computes, 12 bytes a number, so that
        `Result.explain` finds where a port first goes wrong. Its causes are tried only where the
        reference is.

    Returns:
      The `Golden`. Its `save(folder)` writes it, and `load_golden(folder)` reads it where there is
      no torch.

    Raises:
      TypeError, ValueError: as `check` raises them; ValueError also as `explain` does, with `taps`.
    """
    expect_none(reference_problems(reference, dtype, gradients, seed, reference_call))
    given = Inputs.of(inputs, float_dtype(dtype))
    copied = Inputs(
        tuple(a.copy() for a in given.args), {k: a.copy() for k, a in given.kwargs.items()}
    )
    prepared = prepare_module(
        reference, copied, reference_call, dtype, bool(gradients), int(seed), parameters
    )
    versions = {name: version(name) for name in PACKAGES}
    packages = {name: found for name, found in versions.items() if found is not None}
    golden = Golden.of(prepared, {"python": platform.python_version(), **packages})
    if taps:
        golden = replace(golden, answers={**golden.answers, TAPS: _taps(prepared)})
    prepared.reference.expect_unwritten()
    return golden


def _taps(prepared: Prepared) -> Captured:
    """Record the tensors of a forward pass and, if gradients are compared, of a backward pass."""
    outputs = floating(prepared.inference)
    cotangents = cotangents_of(outputs, prepared.dtype) if prepared.gradients else {}
    found = torch_taps(prepared.reference, prepared.dtype, cotangents, free_memory())
    results = found.without_steps
    return captured(results.taps, results.spreads, found.run.kinds["output"])
