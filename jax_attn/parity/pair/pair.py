"""Pairs of a reference and its port, with the arguments by which they are checked."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import optax
    import torch
    from jax.sharding import Mesh, PartitionSpec

    from jax_attn.training.recipe import MakeOptimizer, MakeScheduler
    from jax_attn.transfer import Layout

Given = tuple[np.ndarray, ...] | Mapping[str, np.ndarray]
"""NumPy arrays that both sides receive, by position (a tuple) or by keyword (a dict)."""
Inputs = Given | list[Given]

FIXED = ("inputs", "dtype", "gradients", "seed", "reference_call", "parameters")
"""The fields of a `Pair` with which a golden reference is captured, and which it then fixes."""


@dataclass(frozen=True, eq=False)
class Pair:
    """A reference, its port and their inputs, with the other arguments of `parity.check`.

    `jax-attn check`, `bench --pair` and `parity.check(p.reference, p.port, p.inputs, **p.options)`
    take it. The attributes that are not listed here are the arguments of `parity.check` of the same
    names. Nothing is validated before the pair is checked.

    Attributes:
      reference: the torch module; None if a golden reference judges the port.
      port: its port; None if only its reference is captured.
      inputs: NumPy arrays by position (a tuple) or by keyword (a dict), or a list of such inputs,
        which only a check takes; None if a golden reference holds them.
      dtype: the dtype of both; None stands for that of the reference's first floating-point
        parameter, or float32 if it has none.
    """

    reference: "torch.nn.Module"
    port: Any
    inputs: Inputs
    _: KW_ONLY
    layout: "Layout | None" = None
    reference_call: Callable[..., Any] | None = None
    port_call: Callable[..., Any] | None = None
    dtype: str | None = None
    gradients: bool | None = None
    transforms: Sequence[str] = ("eager", "jit")
    seed: int | None = None
    strict: bool = False
    parameters: str | tuple[str, ...] | None = None
    mesh: "Mesh | None" = None
    specs: "Mapping[str, PartitionSpec] | None" = None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `parity.check` beyond the first three, by name."""
        return _options(self, Pair)


@dataclass(frozen=True, eq=False)
class TrainingPair:
    """A reference, its port and their batches, with the other arguments of `check_training`.

    `jax-attn check --training` and `parity.check_training(p.reference, p.port, p.batches,
    **p.options)` take it. The attributes that are not listed here are the arguments of
    `parity.check_training` of the same names.

    Attributes:
      reference: the torch module.
      port: its port.
      batches: dicts of NumPy arrays, each with a "target".
      dtype: as in a `Pair`.
    """

    reference: "torch.nn.Module"
    port: Any
    batches: "Sequence[Mapping[str, np.ndarray]]"
    _: KW_ONLY
    layout: "Layout"
    optimizer: "MakeOptimizer"
    loss: str | tuple[Callable[..., Any], Callable[..., Any]]
    steps: int = 10
    schedule: "MakeScheduler | None" = None
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    accumulated: str = "sum"
    port_optimizer: "optax.GradientTransformation | None" = None
    port_state: Any = None
    reference_call: Callable[..., Any] | None = None
    port_call: Callable[..., Any] | None = None
    dtype: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `parity.check_training` beyond the first three, by name."""
        return _options(self, TrainingPair)


def _options(pair: Pair | TrainingPair, kind: type) -> dict[str, Any]:
    options = {f.name: getattr(pair, f.name) for f in fields(kind) if f.kw_only}
    return options | {"dtype": options["dtype"] or _dtype(pair.reference)}


def _dtype(reference: Any) -> str:
    """Return the dtype of the reference's first floating-point parameter, or float32."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(reference, torch.nn.Module):
        return "float32"
    floats = (p.dtype for p in reference.parameters() if p.is_floating_point())
    return str(next(floats, "torch.float32")).removeprefix("torch.")
