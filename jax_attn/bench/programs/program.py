"""`TimedProgram`: the result of a builder, which an engine runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jax_attn.bench.workload import Workload
from jax_attn.transfer import LAYOUTS, Layout

Arrays: TypeAlias = Mapping[str, np.ndarray]


class UnsuitedError(ValueError):
    """An implementation cannot serve a workload; the message says why."""


@dataclass(frozen=True)
class TimedProgram:
    """One implementation of one workload.

    call: in torch `(*inputs)`, holding its weights; in JAX `(*inputs, *weights)`, a pure function.
    weights: arrays that are differentiated besides the inputs, by the implementation's own names,
    in the order of the call. canonical: renames gradients from those names to the `gqa` design's.
    kernel: the kernel that runs. writes_scores: whether all T×S scores are in memory at once.
    compiled: whether torch compiles it.
    cache: only for a workload with a cache, which has no weights. In torch it is None, because
    call writes into its own cache in place. In JAX it is a pytree that call takes before the inputs
    and returns after its output with the same fill count, so that the next call repeats the same
    step; the engine donates it. cache_bytes: bytes of its keys and values.
    """

    call: Callable[..., Any]
    weights: Mapping[str, Any]
    canonical: Callable[[Arrays], Arrays] = dict
    kernel: str = ""
    writes_scores: bool = True
    compiled: bool = False
    cache: Any = None
    cache_bytes: int | None = None


class TimedCall(NamedTuple):
    """One mode of a program in JAX, as a pure function of a state of named arrays.

    jitted: the compiled function. takes: names of its arguments. gives: names of the parts of its
    result that replace arrays of the state; "" for a part that does not.
    """

    jitted: Any
    takes: tuple[str, ...]
    gives: tuple[str, ...] = ()

    def __call__(self, state: dict[str, Any]) -> Any:
        """Start the call, and return its result, which may be unfinished."""
        result = self.jitted(*[state[name] for name in self.takes])
        if self.gives:
            state.update((n, part) for n, part in zip(self.gives, result, strict=True) if n)
        return result

    def lowered(self, state: Mapping[str, Any]) -> Any:
        return self.jitted.lower(*[state[name] for name in self.takes])


def flax_shapes(workload: Workload) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the layer's weights in this package's modules, by dotted path."""
    N, K, H, D = workload.N, workload.K, workload.H, workload.D
    shapes: dict[str, tuple[int, ...]] = {"out_proj.kernel": (N, H, D), "out_proj.bias": (D,)}
    for part, heads in (("q", N), ("k", K), ("v", K)):
        shapes |= {f"{part}_proj.kernel": (D, heads, H), f"{part}_proj.bias": (heads, H)}
    return shapes


def in_design(workload: Workload, layout: Layout, weights: Arrays) -> dict[str, np.ndarray]:
    """Rename the weights to another torch design, through the tables of both designs."""
    return layout.to_torch(LAYOUTS["gqa"].to_flax(weights, flax_shapes(workload)))


def from_design(workload: Workload, layout: Layout, gradients: Arrays) -> dict[str, np.ndarray]:
    """Rename gradients of another torch design to the `gqa` design."""
    return LAYOUTS["gqa"].to_torch(layout.to_flax(gradients, flax_shapes(workload)))
