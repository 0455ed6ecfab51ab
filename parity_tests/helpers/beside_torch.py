"""Compare a rule with torch's operator: values and gradients in float64, dtypes in float32."""

import ast
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from helpers.operators import in_jax, operator
from jax_attn.translate.rules.expression import literal, parsed
from jax_attn.translate.rules.rule import Array, VaryingSize, bound, described, expressions
from jax_attn.translate.rules.table import RULES

FLOAT64, FLOAT32 = 2.0**-53, 2.0**-24
WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def draws(seed: int) -> tuple[Any, Any]:
    """Return functions that draw floating tensors, and whole numbers below a limit."""
    generator = torch.Generator().manual_seed(seed)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def whole(limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, limit, shape, generator=generator)

    return real, whole


def row(name: str, *args: Any, text: str | None = None, **kwargs: Any) -> Any:
    """Name one call by its operator and the shape of its first tensor."""
    sizes = "x".join(str(size) for each in flat(list(args))[:1] for size in each.shape)
    return pytest.param(name, args, kwargs, text, id=f"{name.removeprefix('aten.')}-{sizes}")


def check(name: str, args: Any, kwargs: Any, text: str | None) -> None:
    """Compare one call, and assert how it is written if the row says so."""
    written = compare(name, *args, **kwargs)
    assert text is None or written == text


def assert_caught(name: str, wrong: Any, *args: Any, **kwargs: Any) -> None:
    """Assert that a right rule passes and a wrong one does not."""
    compare(name, *args, **kwargs)
    with mock.patch.dict(RULES, {name: wrong}), pytest.raises(AssertionError):
        compare(name, *args, **kwargs)


def with_varying(size: int, name: str, *args: Any, **kwargs: Any) -> str:
    """Return the text of a call if each size of this value varies: it is called T there."""

    def varied(value: Any) -> Any:
        if isinstance(value, Array):
            return Array(tuple(varied(each) for each in value.shape), value.dtype)
        if isinstance(value, (list, tuple)):
            return [varied(each) for each in value]
        return VaryingSize(size) if value == size and isinstance(value, int) else value

    def written(name: str, value: Any) -> ast.expr:
        if isinstance(value, torch.Tensor):
            return parsed(name)
        if isinstance(value, (list, tuple)):
            return ast.Tuple([written(f"{name}{i}", each) for i, each in enumerate(value)])
        return parsed("T") if value == size and isinstance(value, int) else literal(value)

    arguments = bound(operator(name), args, kwargs)
    result = expressions(
        RULES[name],
        {key: varied(described(each)) for key, each in arguments.items()},
        {key: written(key, each) for key, each in arguments.items()},
        varied(described(operator(name)(*args, **kwargs))),
    )
    trees = result if isinstance(result, tuple) else (result,)
    text = "; ".join(ast.unparse(ast.fix_missing_locations(tree)) for tree in trees)
    assert str(size) not in text, text
    return text


def flat(value: Any) -> list[Any]:
    """Return the arrays in arguments or results."""
    if isinstance(value, (list, tuple)):
        return [each for part in value for each in flat(part)]
    return [value] if isinstance(value, (torch.Tensor, jax.Array)) else []


def doubled(name: str, value: Any) -> Any:
    """Widen tensors; torch gives a gradient to all but running statistics."""
    if isinstance(value, (list, tuple)):
        return [doubled(name, each) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    twin = value.detach().clone().to(WIDER.get(value.dtype, value.dtype))
    differentiable = twin.dtype.is_floating_point or twin.dtype.is_complex
    return twin.requires_grad_(differentiable and not name.startswith("running"))


def assert_dtypes(name: str, *args: Any, **kwargs: Any) -> None:
    """Assert that shapes and dtypes are torch's, where an int64 of torch is an int32."""
    run, arrays, text = in_jax(name, *args, **kwargs)
    got = jax.tree.leaves(jax.eval_shape(run, arrays))
    for theirs, ours in zip(flat(operator(name)(*args, **kwargs)), got, strict=False):
        dtype = str(theirs.dtype).removeprefix("torch.").replace("int64", "int32")
        assert (tuple(theirs.shape), dtype) == (ours.shape, str(ours.dtype)), text


def compare(
    name: str, *args: Any, roundoff: float = FLOAT64, outputs: int | None = None, **kwargs: Any
) -> str:
    """Assert that a rule computes what torch's operator does, and return its text.

    Args:
      name: the operator, such as `aten.add.Tensor`.
      args: its arguments, with tensors in float32, which are compared in float64.
      roundoff: of the dtype in which the expression computes.
      outputs: how many outputs to compare, from the first; by default all of them.
      kwargs: its arguments by name.
    """
    assert_dtypes(name, *args, **kwargs)
    kwargs = {key: doubled(key, each) for key, each in bound(operator(name), args, kwargs).items()}
    arguments = flat(list(kwargs.values()))
    theirs = flat(operator(name)(**kwargs))[:outputs]
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(each.shape, dtype=each.dtype, generator=generator) * each.requires_grad
        for each in theirs
        if each.dtype.is_floating_point or each.dtype.is_complex
    ]
    with jax.enable_x64(True):
        run, arrays, text = in_jax(name, **kwargs)
        names = [key for key, each in zip(arrays, arguments, strict=True) if each.requires_grad]

        def inexact(varied: Any) -> tuple[list[jax.Array], list[jax.Array]]:
            every = jax.tree.leaves(run({**arrays, **varied}))[: len(theirs)]
            return [x for x in every if jnp.issubdtype(x.dtype, jnp.inexact)], every

        def forward_and_gradients(varied: Any) -> tuple[Any, Any]:
            _, pull, every = jax.vjp(inexact, varied, has_aux=True)
            # JAX conjugates nothing, torch both cotangents and gradients.
            return every, pull([weight.conj().resolve_conj().numpy() for weight in weights])[0]

        fast = jax.jit(
            forward_and_gradients, compiler_options={"xla_backend_optimization_level": 0}
        )
        ours, pulled = fast({key: arrays[key] for key in names})
    size = sum(each.numel() for each in [*arguments, *theirs])
    _judge(theirs, ours, size * roundoff, text)
    inputs = [each for each in arguments if each.requires_grad]
    if inputs and any(each.requires_grad for each in theirs):
        differentiable = [each for each in theirs if each.is_floating_point() or each.is_complex()]
        total = sum(
            (each.conj() * weight).real.sum()
            for each, weight in zip(differentiable, weights, strict=True)
        )
        gradients = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
        wanted = [each.conj().resolve_conj() for each in gradients]
        _judge(wanted, [pulled[key] for key in names], size * roundoff, f"gradient of {text}")
    return text


def _judge(wanted: list[torch.Tensor], got: list[jax.Array], rounding: float, text: str) -> None:
    """Assert equality up to the rounding of so many terms, each as large as the largest value."""
    for theirs, ours in zip(wanted, got, strict=True):
        expected, array = theirs.detach().resolve_conj().numpy(), np.asarray(ours)
        assert expected.shape == array.shape, text
        if not np.issubdtype(expected.dtype, np.inexact):
            np.testing.assert_array_equal(array, expected, err_msg=text)
            continue
        magnitude = max(1.0, np.abs(expected[np.isfinite(expected)]).max(initial=0.0))
        np.testing.assert_allclose(array, expected, rtol=0, atol=rounding * magnitude, err_msg=text)
