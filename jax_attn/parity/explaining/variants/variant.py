"""One thing that a port does in place of what the reference does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jax_attn.parity.explaining.taps.tap import FILL

Change = Callable[["Call"], Any]
"""A call -> the result in place of the operator's own."""


@dataclass(frozen=True)
class Call:
    """One call of an operator in float64.

    Attributes:
      name: the operator's, as "bmm".
      right: runs the operator as it is on these arguments, or on others.
      leaves: for each of `args`, the name of the parameter that it is, or is a view of; or "".
      parameters: every parameter by name, in float64.
      is_backward: whether it is of the backward pass.
      memory: what changes of several calls of one run tell each other.
    """

    name: str
    right: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: tuple[str, ...] = ()
    parameters: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    is_backward: bool = False
    memory: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def with_args(self, *args: Any, **kwargs: Any) -> Any:
        """The result on other arguments."""
        return self.right(*args, **{**self.kwargs, **kwargs})

    def result(self) -> Any:
        """The right result."""
        return self.right(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Variant:
    """What a call may be in a port.

    Attributes:
      name: the field's word, then what is meant: "epsilon", "activation (gelu by tanh)".
      says: what the reference has then, to follow "with": "an epsilon of 1e-06 in place of 1e-05".
      change: the result in place of the right one.
      value: the number that was found, where there is one.
      unit: of what is rounded to a narrower dtype, the distance between its numbers around 1: next
        to the middle of two, a port may round to the other.
    """

    name: str
    says: str
    change: Change = field(repr=False)
    value: float | str | None = None
    unit: float = 0.0


PRODUCTS = {"addmm", "bmm", "mm"}
"""Operators of a matrix product."""


def is_number(x: Any) -> bool:
    """Whether an argument is a number, or a tensor of one."""
    if isinstance(x, Tensor):
        return x.ndim == 0 and x.is_floating_point()
    return isinstance(x, int | float) and not isinstance(x, bool)


def float_tensors(args: Sequence[Any]) -> list[int]:
    """The places of the arguments that are floating-point tensors with axes."""
    return [
        i for i, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point() and x.ndim
    ]


def arguments(at: Mapping[int, Any]) -> Change:
    """The same operator with other arguments in some places."""

    def change(call: Call) -> Any:
        return call.with_args(*(at.get(i, x) for i, x in enumerate(call.args)))

    return change


def result(of: Callable[[Tensor], Tensor]) -> Change:
    """What a function makes of the right result; of several, of the first."""

    def change(call: Call) -> Any:
        right = call.result()
        return of(right) if isinstance(right, Tensor) else (of(right[0]), *right[1:])

    return change


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as it is kept in a narrower dtype; a mask's fill as it is."""
    return torch.where(x.abs() < FILL, x.to(dtype).to(x.dtype), x)
