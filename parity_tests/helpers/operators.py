"""Run a rule of the translator as the written file would, and torch's operator beside it."""

import ast
from typing import Any

import jax
import jax.numpy as jnp
import torch

from jax_attn.translate.rules.expression import Written, literal
from jax_attn.translate.rules.rule import bound, described, expressions
from jax_attn.translate.rules.table import RULES
from jax_attn.translate.rules.written import FUNCTIONS

NAMES = {"jax": jax, "jnp": jnp, **FUNCTIONS}


def operator(name: str) -> torch._ops.OpOverload:
    """Return torch's operator of a name such as `aten.add.Tensor`."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _array(tensor: torch.Tensor) -> jax.Array:
    if tensor.dtype == torch.bfloat16:
        return jnp.asarray(tensor.float().numpy(), dtype=jnp.bfloat16)
    return jnp.asarray(tensor.resolve_conj().numpy())


class _Call:
    """The arguments of a call, with each tensor as a name of its own."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}

    def written(self, value: Any) -> Written:
        if isinstance(value, torch.Tensor):
            name = f"x{len(self.arrays)}"
            self.arrays[name] = _array(value.detach())
            return ast.Name(name, ast.Load())
        if isinstance(value, (list, tuple)):
            return ast.Tuple([self.written(each) for each in value], ast.Load())
        return literal(value)


def in_jax(name: str, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, jax.Array], str]:
    """Return a function of the call's tensors that runs the rule, these tensors, and its text."""
    target = operator(name)
    arguments = bound(target, args, kwargs)
    call = _Call()
    operands = {key: call.written(value) for key, value in arguments.items()}
    out = described(target(*args, **kwargs))
    result = expressions(
        RULES[name], {k: described(v) for k, v in arguments.items()}, operands, out
    )
    trees = result if isinstance(result, tuple) else (result,)
    texts = [ast.unparse(ast.fix_missing_locations(tree)) for tree in trees]
    codes = [compile(text, name, "eval") for text in texts]

    def run(arrays: dict[str, jax.Array]) -> Any:
        values = tuple(eval(code, dict(NAMES), arrays) for code in codes)
        return values if isinstance(result, tuple) else values[0]

    return run, call.arrays, "; ".join(texts)
