"""Run a rule of the translator as the written file would, and torch's operator beside it."""

import ast
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_attn.translate.rules.expression import Written, literal
from jax_attn.translate.rules.rule import Rule, bound, described, expressions
from jax_attn.translate.rules.written import FUNCTIONS

NAMES = {"jax": jax, "jnp": jnp, **FUNCTIONS}


def operator(name: str) -> torch._ops.OpOverload:
    """Return torch's operator of a name such as `aten.add.Tensor`."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype == torch.bfloat16:
        return tensor.float().numpy().astype(jnp.bfloat16)
    return tensor.numpy()


class _Call:
    """The arguments of a call, with each tensor as a name of its own."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}

    def written(self, value: Any) -> Written:
        if isinstance(value, torch.Tensor):
            name = f"x{len(self.arrays)}"
            self.arrays[name] = as_numpy(value)
            return ast.Name(name, ast.Load())
        if isinstance(value, (list, tuple)):
            return ast.Tuple([self.written(each) for each in value], ast.Load())
        return literal(value)


def in_jax(
    rule: Rule, name: str, args: Any, kwargs: Any, out: Any
) -> tuple[Callable[..., tuple[Any, ...]], dict[str, np.ndarray], str]:
    """Write a call by a rule.

    Args:
      rule: of the operator.
      name: the operator's.
      args: its arguments.
      kwargs: its arguments by name.
      out: its results.

    Returns:
      A function from arrays and the names of modules to the results, the arrays of the call by
      their names, and the text.
    """
    arguments = bound(operator(name), args, kwargs)
    call = _Call()
    operands = {key: call.written(value) for key, value in arguments.items()}
    described_arguments = {key: described(value) for key, value in arguments.items()}
    result = expressions(rule, described_arguments, operands, described(out))
    trees = result if isinstance(result, tuple) else (result,)
    texts = [ast.unparse(ast.fix_missing_locations(tree)) for tree in trees]
    codes = [compile(text, name, "eval") for text in texts]

    def run(arrays: dict[str, Any], names: dict[str, Any] = NAMES) -> tuple[Any, ...]:
        values = tuple(eval(code, dict(names), arrays) for code in codes)
        if not isinstance(result, tuple) and isinstance(values[0], (list, tuple)):
            return tuple(values[0])
        return values

    return run, call.arrays, "; ".join(texts)
