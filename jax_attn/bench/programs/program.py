"""What a builder makes of a workload, for an engine to run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_attn.bench.workload import Workload
from jax_attn.transfer import LAYOUTS, Layout

Arrays = Mapping[str, np.ndarray]


class UnsuitedError(ValueError):
    """An implementation that cannot serve a workload; the message says why."""


@dataclass(frozen=True)
class Program:
    """One implementation of one workload.

    call: torch: `(*inputs)`, its weights within; jax: `(*inputs, *weights)`, a pure function.
    weights: what is differentiated besides the inputs, by the implementation's own names, in
    the order of the call. canonical: gradients under those names -> under the `gqa` design's.
    kernel: what runs. writes_scores: whether all T×S of them are in memory at once.
    compiled: whether torch compiles it. cache: of a workload that has one, and then without
    weights: torch: None, as call writes into its own in place; jax: a pytree that call takes
    before the inputs and gives back beside its output, as filled as it was, so that the next call
    is the same one; the engine donates it. cache_bytes: of its keys and values.
    """

    call: Callable[..., Any]
    weights: Mapping[str, Any]
    canonical: Callable[[Arrays], Arrays] = dict
    kernel: str = ""
    writes_scores: bool = True
    compiled: bool = False
    cache: Any = None
    cache_bytes: int | None = None


def flax_shapes(workload: Workload) -> dict[str, tuple[int, ...]]:
    """The layer's weights as this package's modules have them, by dotted path."""
    N, K, H, D = workload.N, workload.K, workload.H, workload.D
    shapes = {f"{p}_proj.kernel": (D, n, H) for p, n in (("q", N), ("k", K), ("v", K))}
    shapes |= {f"{p}_proj.bias": (n, H) for p, n in (("q", N), ("k", K), ("v", K))}
    return shapes | {"out_proj.kernel": (N, H, D), "out_proj.bias": (D,)}


def in_design(workload: Workload, layout: Layout, weights: Arrays) -> dict[str, np.ndarray]:
    """The weights under another torch design's names, by way of the two tables."""
    return layout.to_torch(LAYOUTS["gqa"].to_flax(weights, flax_shapes(workload)))


def from_design(workload: Workload, layout: Layout, gradients: Arrays) -> dict[str, np.ndarray]:
    """The way back: gradients of another torch design, under the `gqa` design's names."""
    return LAYOUTS["gqa"].to_torch(layout.to_flax(gradients, flax_shapes(workload)))
