"""Put operands into templates: cast to the dtype in which torch computes, and axes as Python."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch

from jax_attn.translate.rules.expression import DTYPES
from jax_attn.translate.rules.rule import Array, Rule, VaryingSize


def replaced(template: str, **by: str) -> str:
    """Replace names in a template by other expressions."""
    for name, expression in by.items():
        template = re.sub(rf"\b{name}\b(?!\s*=[^=])", expression, template)
    return template


def torch_dtype(operands: Sequence[Any]) -> str:
    """Return the dtype, by JAX's name, to which torch promotes tensors and numbers.

    A tensor without axes decides only if no tensor with axes is of its kind, or of a higher one.
    """
    values = [
        torch.empty((1,) * each.rank, dtype=getattr(torch, each.dtype))
        if isinstance(each, Array)
        else each.hint
        if isinstance(each, VaryingSize)
        else each
        for each in operands
    ]
    ranked: dict[bool, list[Any]] = {True: [], False: []}
    for each in values:
        ranked[isinstance(each, torch.Tensor) and each.ndim > 0].append(each)
    result = None
    for each in ranked[True] + ranked[False]:
        if result is None:
            result = each
        else:
            dtype = torch.result_type(result, each)
            rank = int(isinstance(result, torch.Tensor) and result.ndim > 0)
            result = torch.empty((1,) * rank, dtype=dtype)
    dtype = result.dtype if isinstance(result, torch.Tensor) else torch.tensor(result).dtype
    return DTYPES[dtype]


def jax_dtype(operands: Sequence[Any]) -> tuple[str, bool]:
    """Return the dtype to which JAX promotes the same, and whether it is weak.

    A weak one, as of an integer array times 1.5, gives way to whatever it meets later.
    """
    arrays = [jnp.dtype(each.dtype) for each in operands if isinstance(each, Array)]
    has_float = any(isinstance(each, float) for each in operands)
    if not arrays:
        return "float32" if has_float else "int32", True
    dtype = functools.reduce(jnp.promote_types, arrays)
    if has_float and not jnp.issubdtype(dtype, jnp.inexact):
        return "float32", True
    if dtype == jnp.bool_ and any(type(each) in (int, VaryingSize) for each in operands):
        return "int32", True
    return str(dtype), False


def as_dtype(name: str, dtype: str) -> str:
    """Write a cast."""
    return f"{name}.astype(jnp.{dtype})"


def promoted(template: str, arguments: dict[str, Any], dtype: str | None = None) -> str:
    """Return the template with casts of the operands that JAX would promote otherwise than torch.

    Args:
      template: an expression in the names of `arguments`.
      arguments: the tensors and numbers that are promoted.
      dtype: in what torch computes, by default what the arguments promote to.
    """
    dtype = dtype or torch_dtype(list(arguments.values()))
    if jax_dtype(list(arguments.values())) == (dtype, False):
        return template
    wrong = {
        name: as_dtype(name, dtype)
        for name, each in arguments.items()
        if isinstance(each, Array) and each.dtype != dtype
    }
    if not any(isinstance(each, Array) for each in arguments.values()):
        wrong = {name: f"jnp.{dtype}({name})" for name in list(arguments)[:1]}
    return replaced(template, **wrong)


def binary(template: str) -> Callable[[Any, Any], str]:
    """Make the rule of an operator of `self` and `other`."""

    def rule(self: Any, other: Any) -> str:
        return promoted(template, {"self": self, "other": other})

    return rule


def in_floats(template: str) -> Callable[[Array, Array], str]:
    """Make the rule of a function that JAX has only for floating numbers."""

    def rule(self: Array, out: Array) -> str:
        if self.dtype == out.dtype:
            return template
        return replaced(template, self=as_dtype("self", out.dtype))

    return rule


def in_float32(template: str) -> Callable[[Array, Array], str]:
    """Make the rule of a function that JAX has for no floating numbers of fewer bits."""

    def rule(self: Array, out: Array) -> str:
        value = template
        if self.dtype != "float32":
            value = replaced(template, self=as_dtype("self", "float32"))
        return value if out.dtype == "float32" else as_dtype(value, out.dtype)

    return rule


def all_axes(dim: Any, rank: int) -> bool:
    """Return whether torch reduces over every axis: none is named, or all are."""
    if dim is None or rank == 0:
        return True
    named = dim if isinstance(dim, (list, tuple)) else [dim]
    return len(named) in (0, rank)


def axis(dim: Any, rank: int) -> str | None:
    """Write torch's `dim` as NumPy's `axis`; None stands for all axes."""
    if all_axes(dim, rank):
        return None
    if isinstance(dim, int):
        return str(dim)
    return str(dim[0]) if len(dim) == 1 else str(tuple(dim))


def positive(dim: int, rank: int) -> int:
    return dim % max(rank, 1)


def both(name: str, rule: Rule, *overloads: str) -> dict[str, Rule]:
    """Name a rule by an operator's overloads, those of a tensor and of a number unless given."""
    return {f"aten.{name}.{overload}": rule for overload in overloads or ("Tensor", "Scalar")}


def copying_too(views: dict[str, Rule]) -> dict[str, Rule]:
    """Name the rules of operators that give a view, and of their forms that give a copy."""
    copies = {name.replace(".", "_copy.", 1): rule for name, rule in views.items()}
    return {f"aten.{name}": rule for name, rule in {**views, **copies}.items()}
