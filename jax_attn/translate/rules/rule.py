"""Apply a rule: from an operator's arguments to the JAX expression that computes the same.

A rule is a template, `"jnp.exp(self)"`, whose names are the arguments of the operator's schema; or
a function that takes the arguments it needs by these names and returns a template. A function sees
each tensor as an `Array`, each size that varies as a `VaryingSize`, and constants as they are. It
returns a tuple of templates where the operator has several outputs, one an output; a single
template then stands for an expression that evaluates to all of them.

A parameter with a default may name an argument that only some of the operator's overloads have.
A parameter named `out` receives the result as torch computed it: an `Array`, or a list of these.
A template may call the functions of `written.py`: a file gets the source of those that it uses.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jax_attn.translate.rules.expression import DTYPES, Written, filled

Templates = str | tuple[str, ...]
Rule = str | Callable[..., Templates]


@dataclass(frozen=True)
class VaryingSize:
    """Stand for a size that varies between calls; `hint` is what it was in the traced one."""

    hint: int


@dataclass(frozen=True)
class Array:
    """Hold the shape and the dtype, by JAX's name, of a tensor."""

    shape: tuple[int | VaryingSize, ...]
    dtype: str

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_floating(self) -> bool:
        return self.dtype in ("float16", "bfloat16", "float32")


def described(value: Any) -> Any:
    """Return what a rule sees of a tensor, a symbolic size, a constant, or a sequence of these."""
    if isinstance(value, torch.Tensor):
        return Array(tuple(described(size) for size in value.shape), DTYPES[value.dtype])
    if isinstance(value, torch.SymInt):
        return VaryingSize(int(value.node.hint))
    if isinstance(value, (list, tuple)):
        return [described(each) for each in value]
    return value


def bound(
    operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Name the arguments of a call, defaults included, as the schema names and orders them."""
    schema = operator._schema.arguments
    given = {**dict(zip((each.name for each in schema), args, strict=False)), **kwargs}
    return {
        each.name: given.get(each.name, each.default_value)
        for each in schema
        if each.name in given or each.has_default_value()
    }


def expressions(
    rule: Rule,
    described_arguments: Mapping[str, Any],
    operands: Mapping[str, Written],
    out: Any,
) -> Written | tuple[Written, ...]:
    """Write one call of an operator by its rule.

    Args:
      rule: the operator's rule.
      described_arguments: each argument as a function sees it, by the schema's name.
      operands: the same arguments as expressions.
      out: the described result.
    """
    if isinstance(rule, str):
        return filled(rule, operands)
    offered = {**described_arguments, "out": out}
    asked = inspect.signature(rule).parameters
    templates = rule(**{name: offered[name] for name in asked if name in offered})
    if isinstance(templates, str):
        return filled(templates, operands)
    return tuple(filled(template, operands) for template in templates)
