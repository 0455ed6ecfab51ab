"""Tell whether a check would see a planted bug."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from jax_attn.parity.bugs.planting import run_planted
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.budget import PRECISIONS
from jax_attn.parity.run.modes.float64_mode import Float64
from jax_attn.parity.run.reference import Reference


def is_seen(prepared: Prepared, planted: Callable[[], Float64]) -> bool | None:
    """Return whether the comparison fails an output or, if compared, a gradient with a bug.

    None if the reference raises an error with the bug. planted: makes a mode that plants it, one
    for each run.
    """
    for cotangents in ({}, prepared.cotangents) if prepared.gradients else ({},):
        run = run_planted(prepared.reference, planted(), cotangents)
        if run is None:
            return None
        if prepared.would_fail(run):
            return True
    return False


def changes(prepared: Prepared, reference: Reference) -> bool:
    """Return whether another reference runs, and gives outputs that would fail."""
    run = run_planted(reference)
    return run is not None and prepared.would_fail(run)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether every element differs by at most a float32 roundoff of b's largest element.

    A check in float32 or narrower does not show smaller differences. Two float64 runs of one module
    differ by that much only after 2**29 roundings in the same direction, or by cancellation of
    as many digits.
    """
    largest = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    atol = PRECISIONS["float32"].store * largest
    return np.allclose(a, b, rtol=0, atol=atol, equal_nan=True)


def settings(module: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the attributes of each part of a module, and those of its config."""
    for part in module.modules():
        yield vars(part)
        if hasattr(config := getattr(part, "config", None), "__dict__"):
            yield vars(config)
