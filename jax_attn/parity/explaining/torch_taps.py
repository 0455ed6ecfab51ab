"""The tensors that a torch module computes in float64, and how far rounding moves each."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload

from jax_attn.parity.explaining.places import Places
from jax_attn.parity.explaining.recording import Name, Operation, Recording, written
from jax_attn.parity.explaining.tap import Tap
from jax_attn.parity.explaining.tapping import Tapping, seen
from jax_attn.parity.judge.budget import PRECISIONS
from jax_attn.parity.run.inputs_and_runs import Arrays, Run
from jax_attn.parity.run.modes.constants import Kwargs
from jax_attn.parity.run.modes.float64_mode import Unperturbed
from jax_attn.parity.run.modes.perturbed_mode import Perturbed
from jax_attn.parity.run.reference import Reference

_RUNS = 4
"""Perturbed runs from which each tensor's spread is estimated: of all its elements together."""


@dataclass(frozen=True)
class TorchTaps:
    """The taps of a run.

    spreads: by how much rounding moves each number (RMS). run: its outputs and gradients. tensors:
    those of the taps. recording: every operation.
    """

    taps: list[Tap]
    spreads: list[np.ndarray]
    run: Run
    tensors: list[torch.Tensor]
    recording: Recording


class _Exact(Tapping, Unperturbed):
    """Float64, tapped and recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording(seen)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: Kwargs | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        results = result if isinstance(result, tuple | list) else [result]
        tensors = [x if isinstance(x, torch.Tensor) else None for x in results]
        decides = not any(x is not None and x.is_floating_point() for x in tensors)
        call = partial(_called, func, args, dict(kwargs or {}))
        operation = Operation(call, decides, str(self.here()))
        self.recording.add(operation, tensors, is_one=result is not results)
        return result


def _called(func: OpOverload, args: tuple, kwargs: Kwargs, name: Name) -> str:
    """An operation as Python, in float64."""

    def leaf(x: Any) -> str | None:
        if isinstance(x, torch.Tensor):
            return name(x)
        if isinstance(x, torch.dtype):
            return str(torch.float64 if x.is_floating_point else x)
        if isinstance(x, torch.layout | torch.memory_format):
            return str(x)
        return f"torch.{x!r}" if isinstance(x, torch.device) else None

    named = [f"{key}={written(x, leaf)}" for key, x in kwargs.items()]
    return f"torch.ops.{func}({', '.join([*(written(x, leaf) for x in args), *named])})"


class _Moved(Tapping, Perturbed):
    """A perturbed run, tapped."""


def torch_taps(
    reference: Reference, dtype: str, cotangents: Arrays, free: int | None = None
) -> TorchTaps:
    """Every floating-point tensor of a forward and, with cotangents, a backward pass.

    free: bytes of memory, of which half may be used; None where that is not known.
    """
    names = {name: p.detach().double().numpy() for name, p in reference.module.named_parameters()}
    exact = _Exact()
    with Places() as places:
        exact.tap(names, places, math.inf if free is None else free / 2)
        run = reference.under(exact, cotangents)
    precision = PRECISIONS[dtype]
    squares = [np.zeros(tap.shape) for tap in exact.taps]
    for seed in range(1, _RUNS + 1):
        moved = _Moved(precision, seed)
        moved.tap(names, None)
        reference.under(moved, cotangents)
        if [tap.op for tap in moved.taps] != [tap.op for tap in exact.taps]:
            raise ValueError(
                "reference: expected the same operations in every run, but it takes others where "
                "its numbers are rounded otherwise; its tensors cannot be told apart"
            )
        with np.errstate(invalid="ignore", over="ignore"):  # of infinities nothing is asked
            for of_tap, tap, center in zip(squares, moved.taps, exact.taps, strict=True):
                of_tap += np.square(tap.value - center.value)
    spreads = [np.sqrt(a / _RUNS) for a in squares]
    return TorchTaps(exact.taps, spreads, run, exact.tensors, exact.recording)
