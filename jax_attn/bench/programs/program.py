"""`Program`: what a builder makes of a workload, for an engine to run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from jax_attn.bench.workload import Workload
from jax_attn.transfer import LAYOUTS, Layout

Arrays: TypeAlias = Mapping[str, np.ndarray]


class UnsuitedError(ValueError):
    """An implementation cannot serve a workload; the message says why."""


@dataclass(frozen=True)
class Program:
    """One implementation of one workload.

    call: in torch `(*inputs)`, holding its weights; in JAX `(*inputs, *weights)`, a pure function.
    weights: what is differentiated besides the inputs, by the implementation's own names, in
    the order of the call. canonical: gradients under those names → under the `gqa` design's.
    kernel: what runs. writes_scores: whether all T×S scores are in memory at once.
    compiled: whether torch compiles it. cache: for a workload with a cache, which has no weights.
    In torch it is None, as call writes into its own cache in place; in JAX it is a pytree that
    call takes before the inputs and returns after its output with the same fill count, so that
    the next call repeats the same step; the engine donates it. cache_bytes: its keys and values.
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
    """Shapes of the layer's weights in this package's modules, by dotted path."""
    N, K, H, D = workload.N, workload.K, workload.H, workload.D
    shapes: dict[str, tuple[int, ...]] = {"out_proj.kernel": (N, H, D), "out_proj.bias": (D,)}
    for part, heads in (("q", N), ("k", K), ("v", K)):
        shapes |= {f"{part}_proj.kernel": (D, heads, H), f"{part}_proj.bias": (heads, H)}
    return shapes


def in_design(workload: Workload, layout: Layout, weights: Arrays) -> dict[str, np.ndarray]:
    """The weights under another torch design's names, through the two tables."""
    return layout.to_torch(LAYOUTS["gqa"].to_flax(weights, flax_shapes(workload)))


def from_design(workload: Workload, layout: Layout, gradients: Arrays) -> dict[str, np.ndarray]:
    """Gradients of another torch design, under the `gqa` design's names."""
    return LAYOUTS["gqa"].to_torch(layout.to_flax(gradients, flax_shapes(workload)))
