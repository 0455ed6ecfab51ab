"""Write calls and indices as templates, without what is at its default."""

from collections.abc import Sequence
from typing import Any

from jax_attn.translate.rules.rule import Array, VaryingSize


def call(function: str, *arguments: str | None, **named: Any) -> str:
    """Write a call without the arguments that are None."""
    given = [each for each in arguments if each is not None]
    given += [f"{name}={value}" for name, value in named.items() if value is not None]
    return f"{function}({', '.join(given)})"


def indexed(dim: int, rank: int, index: str) -> str:
    """Write the index of one axis, with `...` where that is shorter."""
    before = dim % rank
    after = rank - 1 - before
    if after < before and before > 1:
        return ", ".join(["...", index] + [":"] * after)
    return ", ".join([":"] * before + [index])


def spread(value: Any, count: int, name: str = "") -> tuple[int, ...]:
    """Return one number an axis; torch also takes a single number for all of them."""
    each = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return known(each * count if len(each) == 1 else each, name)


def known(values: Sequence[Any], what: str) -> tuple[int, ...]:
    """Refuse sizes that vary where the expression needs their values."""
    if any(isinstance(value, VaryingSize) for value in values):
        raise NotImplementedError(
            f"{what} varies between calls, and the expression needs its value"
        )
    return tuple(values)


def expect_axes(what: str, *tensors: Array) -> None:
    """Refuse tensors without axes."""
    if any(each.rank == 0 for each in tensors):
        raise NotImplementedError(f"{what} of a tensor without axes")


def trailing(name: str, count: int) -> str:
    """Write a vector of channels so that it broadcasts over `count` axes after them."""
    return f"{name}[{', '.join([':'] + ['None'] * count)}]" if count else name


def affine(expression: str, weight: Any, bias: Any, count: int = 0) -> str:
    """Multiply by `weight` and add `bias`, if they are given, with `count` axes after theirs."""
    if weight is not None:
        expression += f" * {trailing('weight', count)}"
    if bias is not None:
        expression += f" + {trailing('bias', count)}"
    return expression


def cast(name: str, value: Any, dtype: str) -> str:
    """Write a cast, unless the value has the dtype."""
    if isinstance(value, Array) and value.dtype != dtype:
        return f"{name}.astype(jnp.{dtype})"
    return name


def refused(reason: str) -> Any:
    """Make the rule of an operator that has no expression."""

    def rule() -> str:
        raise NotImplementedError(reason)

    return rule


def number(value: Any, dtype: str) -> str:
    """Write a number in the dtype of the tensor that takes it, as torch converts it."""
    if dtype == "bool":
        return str(bool(value))
    if "int" in dtype and not isinstance(value, VaryingSize):
        return str(int(value))
    return "value"
