"""A call of an operator, of which a rule and torch give the results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch

from jax_attn.translate.rules.rule import Rule

FLOAT64, FLOAT32 = 2.0**-53, 2.0**-24


@dataclass(frozen=True)
class Call:
    """A call of an operator, and the rule that writes it.

    name: the operator's, such as `aten.add.Tensor`.
    args, kwargs: its arguments, with floating tensors in float32 to be compared in float64.
    rule: that writes it.
    roundoff: of the dtype in which the expression computes, whatever its operands are.
    outputs: how many results are compared, from the first; the others are None in JAX.
    """

    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    rule: Rule
    roundoff: float = FLOAT64
    outputs: int | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return tensors([*self.args, *self.kwargs.values()])


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in arguments or results."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors(each)]
    return []


def mapped(value: Any, change: Any) -> Any:
    """Change every tensor and dtype in an argument."""
    if isinstance(value, (torch.Tensor, torch.dtype)):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [mapped(each, change) for each in value]
    return value


def is_inexact(tensor: Any) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def attempted(each: Any, run: Callable[..., Any], arrays: dict[str, jax.Array]) -> Any:
    """Run what is compared, and keep an error, so that the others are compared."""
    try:
        return run(arrays)
    except Exception as error:
        each.error = error
        return None


def miscounted(call: Call, got: Sequence[Any], theirs: Sequence[Any]) -> str:
    if len(got) != len(theirs):
        return f"has {len(got)} results, not {len(theirs)}"
    compared = len(theirs) if call.outputs is None else call.outputs
    if any((each is None) != (place >= compared) for place, each in enumerate(got)):
        return f"has None for results, or a result after {compared}"
    return ""
