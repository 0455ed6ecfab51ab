"""Record the tensors that a torch module computes in float64, and how far rounding moves each."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload

from jax_attn.parity.explaining.taps.recording import Name, Operation, Recording, written
from jax_attn.parity.explaining.taps.tap import Tap
from jax_attn.parity.explaining.taps.tape import Played, Tape
from jax_attn.parity.explaining.taps.tapping import Places, Tapping, seen
from jax_attn.parity.judge.budget import PRECISIONS
from jax_attn.parity.run.inputs_and_runs import Arrays, Run
from jax_attn.parity.run.modes.constants import Kwargs, tensors_of
from jax_attn.parity.run.modes.float64_mode import Unperturbed
from jax_attn.parity.run.modes.perturbed_mode import Perturbed
from jax_attn.parity.run.reference import Reference

_COPYING = {"aten._to_copy", "aten.clone"}
_RUNS = 4
"""The number of perturbed runs from which the spread of each tensor is estimated."""


@dataclass(frozen=True)
class TorchTaps:
    """The taps of a run.

    spreads: how far rounding moves each number (RMS). tensors: the tensors of the taps. run: the
    outputs and gradients. recording: every operation. tape: the same operations, to be run again.
    """

    taps: list[Tap]
    spreads: list[np.ndarray]
    tensors: list[torch.Tensor]
    run: Run
    recording: Recording
    tape: Tape

    @cached_property
    def results(self) -> list[int]:
        """The indices of the taps that are not steps inside fused operations."""
        return [tap.index for tap in self.taps if not tap.is_step]

    @cached_property
    def without_steps(self) -> "TorchTaps":
        """The same without steps inside fused operations, renumbered."""
        number = {index: n for n, index in enumerate(self.results)}
        taps = [
            replace(
                self.taps[i],
                index=number[i],
                parents=tuple(number[p] for p in self.taps[i].parents if p in number),
            )
            for i in self.results
        ]
        spreads = [self.spreads[i] for i in self.results]
        tensors = [self.tensors[i] for i in self.results]
        tape = self.tape.renumbered(number)
        return TorchTaps(taps, spreads, tensors, self.run, self.recording, tape)

    @cached_property
    def with_halves(self) -> "TorchTaps":
        """The same with added taps for the halves of each last axis, which rotary positions use."""
        taps, spreads = list(self.taps), list(self.spreads)
        for tap, spread in zip(self.taps, self.spreads, strict=True):
            half, odd = divmod(tap.shape[-1] if tap.shape else 1, 2)
            if odd or half < 2 or tap.is_leaf:
                continue
            for name, part in (("first", slice(half)), ("second", slice(half, None))):
                op, value = f"{tap.op}: {name} half", tap.value[..., part]
                taps.append(Tap(len(taps), op, tap.place, value, tap.parents, is_step=True))
                spreads.append(spread[..., part])
            halves = (len(taps) - 2, len(taps) - 1)
            taps[tap.index] = replace(tap, parents=(*tap.parents, *halves))
        return replace(self, taps=taps, spreads=spreads)


class _Exact(Tapping, Unperturbed):
    """A float64 run, tapped and recorded."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.recording = Recording(seen)
        self.tape = Tape(parameters=parameters)

    def run_on(self, module: torch.nn.Module) -> None:
        if self._places is not None:
            self._places.name_from(module)

    def dispatched(self, func: OpOverload, args: tuple, kwargs: Kwargs) -> Any:
        if self.inside:
            return super().dispatched(func, args, kwargs)
        given = (args, kwargs)
        for x in tensors_of(given):
            self.node(x)  # leaves come first
        leaves, first = tuple(map(self._parameter, args)), len(self.taps)
        origins = tuple(map(self._origin, args))
        writes = self.tape.about_to(func, *given)
        result = super().dispatched(func, args, kwargs)
        results = result if isinstance(result, tuple | list) else [result]
        tensors = [x if isinstance(x, torch.Tensor) else None for x in results]
        decides = not any(x is not None and x.is_floating_point() for x in tensors)
        call = partial(_called, func, args, dict(kwargs))
        operation = Operation(call, decides, str(self.here()))
        is_one = result is not results
        self.recording.add(operation, tensors, is_one=is_one)
        is_backward = torch._C._current_graph_task_id() != -1
        played = Played(func, *given, tuple(tensors), is_one, leaves, origins, is_backward, writes)
        made = (tap.index for tap in self.taps[first:] if not tap.is_step)
        self.tape.add(played, {index: self.tensors[index] for index in made})
        return result

    def _origin(self, x: Any) -> str:
        """Return the module that computes an argument, or ""."""
        index = self.known(x) if isinstance(x, torch.Tensor) else None
        tap = None if index is None else self.taps[index]
        return "" if tap is None or tap.is_leaf else tap.place.module

    def _parameter(self, x: Any) -> str:
        """Return the name of the parameter that an argument is, or is a copy of; else ""."""
        index = self.known(x) if isinstance(x, torch.Tensor) else None
        tap = None if index is None else self.taps[index]
        while tap is not None and tap.op in _COPYING and tap.parents:
            tap = self.taps[tap.parents[0]]
        return tap.place.module if tap and tap.op == "parameter" else ""


def _called(func: OpOverload, args: tuple, kwargs: Kwargs, name: Name) -> str:
    """Write an operation as Python, in float64. Raises UnwrittenError."""

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
    """A tapped perturbed run."""


def torch_taps(
    reference: Reference, dtype: str, cotangents: Arrays, free: int | None = None
) -> TorchTaps:
    """Record every floating-point tensor of a forward and, with cotangents, a backward pass.

    free: bytes of free memory, of which half may be used; None if unknown.

    Raises ValueError if the tensors do not fit, or if perturbed runs use other operations.
    """
    parameters = {name: p.detach().double() for name, p in reference.module.named_parameters()}
    names = {name: p.numpy() for name, p in parameters.items()}
    exact = _Exact(parameters)
    with Places() as places:
        exact.tap(names, places, math.inf if free is None else free / 2)
        run = reference.under(exact, cotangents)
    exact.tape.dtype = exact.dtype
    precision = PRECISIONS[dtype]
    squares = [np.zeros(tap.shape) for tap in exact.taps]
    for seed in range(1, _RUNS + 1):
        moved = _Moved(precision, seed)
        moved.tap(names, None)
        reference.under(moved, cotangents)
        if [tap.op for tap in moved.taps] != [tap.op for tap in exact.taps]:
            raise ValueError(
                "reference: expected the same operations in every run, but rounding its numbers "
                "differently changes them, so its tensors cannot be identified"
            )
        with np.errstate(invalid="ignore", over="ignore"):  # infinities need no spread
            for of_tap, tap, center in zip(squares, moved.taps, exact.taps, strict=True):
                of_tap += np.square(tap.value - center.value)
    spreads = [np.sqrt(a / _RUNS) for a in squares]
    return TorchTaps(exact.taps, spreads, exact.tensors, run, exact.recording, exact.tape)
