"""Bugs of activations and of their derivatives."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from jax_attn.parity.bugs.bug import Bug, Change, OperatorCall

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu by tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu by sigmoid(1.702 x)": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
    "relu": functional.relu,
    "relu squared": lambda x: functional.relu(x).square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
    "none": lambda x: x,
}
"""Name of an activation, as sentences use it -> its function."""

_OPERATORS = {
    "gelu": lambda call: "gelu by tanh" if "tanh" in call.kwargs.values() else "gelu",
    "silu": lambda call: "silu",
    "relu": lambda call: "relu",
    "tanh": lambda call: "tanh",
    "sigmoid": lambda call: "sigmoid",
}
_STEP = 1e-5
"""Step of finite differences."""


def activations(call: OperatorCall) -> Iterator[Bug]:
    """Yield other activations in place of this one."""
    own = _OPERATORS[call.name](call)
    for name, function in ACTIVATIONS.items():
        if name != own:
            yield Bug(
                f"activation ({name})",
                f"the activation {name} in place of {own}",
                _of_argument(function),
            )


def derivatives(call: OperatorCall) -> Iterator[Bug]:
    """Yield derivatives of other activations in the backward pass."""
    own = _OPERATORS[call.name.removesuffix("_backward")](call)
    for name, function in ACTIVATIONS.items():
        if name != own:
            says = f"the derivative of {name} in place of that of {own}"
            yield Bug(f"activation ({name})", says, _derivative(function))


def _derivative(function: Callable[[Tensor], Tensor]) -> Change:
    """Differentiate by finite differences, whose float64 error is far below float32's rounding."""

    def change(call: OperatorCall) -> Tensor:
        cotangent, x = call.args[:2]
        return cotangent * (function(x + _STEP) - function(x - _STEP)) / (2 * _STEP)

    return change


def _of_argument(function: Callable[[Tensor], Tensor]) -> Change:
    return lambda call: function(call.args[0])
