"""A bug of ports: one change of an operator's call, with the words for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jax_attn.parity.bugs import FILL

HIDES = -1e3
"""A number this low, added to a score or put in its place, hides the key."""
PRODUCTS = {"addmm", "bmm", "mm"}
"""Operators of a matrix product."""

Change = Callable[["OperatorCall"], Any]
"""Maps a call to the result that replaces the operator's own."""


class Site(NamedTuple):
    """The n-th operator of its kind in a call of a module: the same site in each of its calls.

    path: that of the module in the reference, "" for the reference itself; None outside all
    modules, where each operator has its own site.
    """

    path: str | None
    nth: int


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator in float64.

    Attributes:
      name: the operator's name, such as "bmm".
      right: a function that runs the unchanged operator on given arguments.
      leaves: for each of `args`, the name of the parameter that it is, or is a view of; or "".
      parameters: every parameter by name, in float64.
      is_backward: whether the call is part of the backward pass.
      memory: data that the changes of several calls in one run share.
      site: where the call is, if the mode that plants bugs tracks it.
      module: the class of the module that makes the call, with the same condition.
      origins: for each of `args`, the path of the module that computes it, or ""; or empty.
    """

    name: str
    right: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: tuple[str, ...] = ()
    parameters: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    is_backward: bool = False
    memory: dict[Any, Tensor] = field(default_factory=dict, repr=False)
    site: Site | None = None
    module: str = ""
    origins: tuple[str, ...] = ()

    def with_args(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator on other arguments; return its result."""
        return self.right(*args, **{**self.kwargs, **kwargs})

    def result(self) -> Any:
        """Return the unchanged result, which is computed once."""
        return self._result

    @cached_property
    def _result(self) -> Any:
        return self.right(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Bug:
    """A change of a call that a port may make.

    Attributes:
      name: the field's word, then details: "epsilon", "activation (gelu by tanh)".
      says: the change in words that follow "with": "an epsilon of 1e-06 in place of 1e-05".
      change: computes the result that replaces the unchanged one.
      value: the number that was found, if there is one.
      unit: if the result is rounded to a narrower dtype, the distance between its numbers around 1;
        near the middle between two numbers, a port may round to the other one.
    """

    name: str
    says: str
    change: Change = field(repr=False)
    value: float | str | None = None
    unit: float = 0.0


def is_number(x: Any) -> bool:
    """Return whether an argument is a number, or a floating-point tensor without axes."""
    if isinstance(x, Tensor):
        return x.ndim == 0 and x.is_floating_point()
    return isinstance(x, int | float) and not isinstance(x, bool)


def float_tensors(args: Sequence[Any]) -> list[int]:
    """Return the indices of the arguments that are floating-point tensors with axes."""
    return [
        i for i, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point() and x.ndim
    ]


def arguments(at: Mapping[int, Any]) -> Change:
    """Return a change that runs the same operator with the arguments `at` some indices."""

    def change(call: OperatorCall) -> Any:
        return call.with_args(*(at.get(i, x) for i, x in enumerate(call.args)))

    return change


def result(of: Callable[[Tensor], Tensor]) -> Change:
    """Return a change that applies a function to the result, or to the first of several."""

    def change(call: OperatorCall) -> Any:
        right = call.result()
        return of(right) if isinstance(right, Tensor) else (of(right[0]), *right[1:])

    return change


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a tensor to a narrower dtype, except for a mask's fill."""
    if x.is_complex():
        return torch.view_as_complex(rounded(torch.view_as_real(x), dtype))
    return torch.where(x.abs() < FILL, x.to(dtype).to(x.dtype), x)
