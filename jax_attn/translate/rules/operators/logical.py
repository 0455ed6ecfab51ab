"""Write operators of truth values and bits, and comparisons."""

from typing import Any

from jax_attn.translate.rules.operands import (
    as_dtype,
    binary,
    both,
    promoted,
    replaced,
    torch_dtype,
)
from jax_attn.translate.rules.rule import Array, Rule


def conjunction(self: Any, other: Any) -> str:
    """Cast a boolean beside an integer: `x & True` is x only where x is a boolean, too."""
    operands = {"self": self, "other": other}
    dtype = torch_dtype([self, other])
    booleans = {
        name: as_dtype(name, dtype)
        for name, each in operands.items()
        if isinstance(each, Array) and each.dtype == "bool" != dtype
    }
    return replaced(promoted("self & other", operands), **booleans)


LOGICAL: dict[str, Rule] = {
    **{
        name: binary(f"self {sign} other")
        for sign, names in {
            "==": "eq",
            "!=": "ne not_equal",
            "<": "lt less",
            "<=": "le less_equal",
            ">": "gt greater",
            ">=": "ge greater_equal",
        }.items()
        for name in (
            f"aten.{each}.{kind}" for each in names.split() for kind in ("Tensor", "Scalar")
        )
    },
    **both("bitwise_and", conjunction),
    **both("bitwise_or", binary("self | other")),
    **both("bitwise_xor", binary("self ^ other")),
    **both("__and__", conjunction),
    **both("__or__", binary("self | other")),
    **both("__xor__", binary("self ^ other")),
    "aten.bitwise_not.default": "~self",
    "aten.logical_and.default": "jnp.logical_and(self, other)",
    "aten.logical_or.default": "jnp.logical_or(self, other)",
    "aten.logical_xor.default": "jnp.logical_xor(self, other)",
    "aten.logical_not.default": "jnp.logical_not(self)",
    **both("bitwise_left_shift", binary("self << other"), "Tensor", "Tensor_Scalar"),
    **both("bitwise_right_shift", binary("self >> other"), "Tensor", "Tensor_Scalar"),
    **both("__lshift__", binary("self << other")),
    **both("__rshift__", binary("self >> other")),
}
