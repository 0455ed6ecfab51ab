"""What rules write for calls with sizes that vary."""

import ast
import re
from collections.abc import Mapping
from typing import Any

import torch

from helpers.rules.operators import operator
from jax_attn.translate.rules.expression import literal, parsed
from jax_attn.translate.rules.rule import Array, VaryingSize, bound, described, expressions
from jax_attn.translate.rules.table import RULES

T = {11: "T"}


def with_varying(name: str, *args: Any, sizes: Mapping[int, str] = T, **kwargs: Any) -> str:
    """Return the text of a call, its tensors named as arguments, if these sizes vary.

    Args:
      name: an operator of aten.
      args: its arguments.
      sizes: numbers that stand for sizes that vary wherever they are met, and how they are called.
      kwargs: its arguments by name.
    """

    def varied(value: Any) -> Any:
        if isinstance(value, Array):
            return Array(tuple(varied(each) for each in value.shape), value.dtype)
        if isinstance(value, (list, tuple)):
            return [varied(each) for each in value]
        return VaryingSize(value) if type(value) is int and value in sizes else value

    def written(name: str, value: Any) -> ast.expr:
        if isinstance(value, torch.Tensor):
            return parsed(name)
        if isinstance(value, (list, tuple)):
            return ast.Tuple([written(f"{name}{i}", each) for i, each in enumerate(value)])
        return parsed(sizes[value]) if type(value) is int and value in sizes else literal(value)

    name = f"aten.{name}"
    arguments = bound(operator(name), args, kwargs)
    result = expressions(
        RULES[name],
        {key: varied(described(each)) for key, each in arguments.items()},
        {key: written(key, each) for key, each in arguments.items()},
        varied(described(operator(name)(*args, **kwargs))),
    )
    trees = result if isinstance(result, tuple) else (result,)
    text = "; ".join(ast.unparse(ast.fix_missing_locations(tree)) for tree in trees)
    numbers = set(map(int, re.findall(r"(?<![\w.])\d+(?![\w.])", text)))
    assert not numbers & set(sizes), text
    return text
