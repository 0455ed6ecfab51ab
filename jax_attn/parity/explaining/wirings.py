"""Causes beside the catalogue: a step left out, and another tensor in place of the right one."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jax_attn.parity.bugs.activations import ACTIVATIONS
from jax_attn.parity.bugs.bug import Bug, Change, OperatorCall, arguments, float_tensors, result
from jax_attn.parity.bugs.views import views
from jax_attn.parity.explaining.taps.tap import Tap

_MOST_ORDERS = 4
_WRITTEN_OUT = ("div", "mul")
"""The last operations of an activation that a module writes out."""
_WIRINGS = {"add": "residual (from another tensor)", "bmm": "packed order"}


def skips(call: OperatorCall, others: Sequence[tuple[str | None, Tap]]) -> Iterator[Bug]:
    """Yield results with a step left out, in which its input replaces its result.

    For a step that is an activation, also yield other activations. others: (the step between a
    tensor and the result, or None if it has no name; the tensor).
    """
    right = _first(call.result())
    for step, tap in others:
        if step is None:
            continue
        for other in _seen_as(tap, right):
            yield Bug(f"{step} (left out)", f"no {step}", _always(other))
            if step == "activation" and call.name in _WRITTEN_OUT:
                yield from _of_other_activations(other, call.name)


def _of_other_activations(x: Tensor, own: str) -> Iterator[Bug]:
    """Yield other activations if the reference writes out its own. own: its last operation."""
    for name, function in ACTIVATIONS.items():
        if name not in ("none", own):
            says = f"the activation {name} in place of its own"
            yield Bug(f"activation ({name})", says, _always(function(x)))


def wirings(call: OperatorCall, others: Sequence[Tap]) -> Iterator[Bug]:
    """Yield other tensors in place of an operand, or of the result."""
    for tap in others:
        for i in float_tensors(call.args):
            operand = call.args[i]
            for other in _seen_as(tap, operand):
                if torch.equal(other, operand):
                    continue
                name, says = _WIRINGS.get(call.name, "order"), _named(tap)
                if torch.equal(other.flatten().sort()[0], operand.flatten().sort()[0]):
                    name, says = "transposed (axes exchanged)", f"{says}, its axes exchanged,"
                says = f"{says} in place of operand {i + 1}"
                yield Bug(name, says, arguments({i: other}))
        for other in _seen_as(tap, _first(call.result())):
            says = f"{_named(tap)} in place of its own result"
            yield Bug("order", says, _always(other))


def _named(tap: Tap) -> str:
    return str(tap) if tap.is_leaf else f"the result of {tap}"


def _always(x: Tensor) -> Change:
    return result(lambda right: x)


def _first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def _seen_as(tap: Tap, x: Tensor) -> Iterator[Tensor]:
    """Yield a tap in the shape of a tensor of the same size, in several orders of its axes."""
    if tap.value.size == x.numel() > 1:
        for view in islice(views(tap.shape, x.shape), _MOST_ORDERS):
            yield torch.from_numpy(np.ascontiguousarray(view.of(tap.value)))
