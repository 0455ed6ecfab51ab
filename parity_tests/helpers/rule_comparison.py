"""Say where a rule of the translator and torch's operator differ: values, gradients, dtypes."""

import re
import types
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch

from helpers import operators
from jax_attn.translate.rules.expression import DTYPES
from jax_attn.translate.rules.rule import bound

EPSILON = 2.0**-53
LOW_PRECISION = (torch.float16, torch.bfloat16)
WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}

# Elementary functions of torch and of XLA are within this many units of the last place.
UNITS = 16

# A file that is written holds 32 bits: where it names a dtype, the comparison means 64.
IN_FLOAT64 = types.SimpleNamespace(
    **{
        **vars(jnp),
        "float32": jnp.float64,
        "complex64": jnp.complex128,
        "int32": jnp.int64,
    }
)


def mapped(value: Any, change: Any) -> Any:
    """Change every tensor in an argument, and widen a dtype."""
    if isinstance(value, torch.dtype):
        return WIDER.get(value, value)
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [mapped(each, change) for each in value]
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors(each)]
    return []


def is_inexact(tensor: Any) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def types_differ(name: str, *args: Any, **kwargs: Any) -> list[str]:
    """Return where shapes and dtypes of results differ, with int64 counted as int32."""
    run, arrays, text = operators.in_jax(name, *args, **kwargs)
    expected = tensors(operators.operator(name)(*args, **kwargs))
    got = jax.tree.leaves(jax.eval_shape(run, arrays))
    expected_types = [(tuple(each.shape), DTYPES[each.dtype], False) for each in expected]
    got_types = [(each.shape, str(each.dtype), each.weak_type) for each in got]
    if expected_types == got_types:
        return []
    return [f"{name}: `{text}` is {got_types} for {expected_types}"]


def values_differ(name: str, *args: Any, **kwargs: Any) -> list[str]:
    """Return where results, or gradients of floating inputs, differ in float64."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            jax.enable_x64(True),
            mock.patch.dict(operators.NAMES, {"jnp": IN_FLOAT64}),
        ):
            constants: set[int] = set()
            while True:
                try:
                    return _values_differ(name, args, kwargs, constants)
                except RuntimeError as error:
                    refused = re.search("not differentiable .* argument '(.*)'", str(error))
                    if not refused:
                        raise
                    given = bound(operators.operator(name), args, kwargs)
                    constants.add(id(given[refused[1]]))
    finally:
        torch.set_default_dtype(default)


def _values_differ(name: str, args: Any, kwargs: Any, constants: set[int]) -> list[str]:
    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.detach().to(WIDER.get(tensor.dtype, tensor.dtype)).clone()
        return wide.requires_grad_(wide.dtype.is_floating_point and id(tensor) not in constants)

    args, kwargs = mapped(args, leaf), {key: mapped(v, leaf) for key, v in kwargs.items()}
    inputs = tensors([*args, *kwargs.values()])
    run, arrays, text = operators.in_jax(name, *args, **kwargs)
    outputs = tensors(operators.operator(name)(*args, **kwargs))
    variables = [each for each in inputs if each.requires_grad]
    names = [key for key, each in zip(arrays, inputs, strict=True) if each.requires_grad]

    rng = np.random.default_rng(7)
    problems: list[str] = []
    # What torch cuts off, as `detach`, gets a cotangent from JAX alone.
    differentiable = [
        n
        for n, each in enumerate(outputs)
        if is_inexact(each) and "NotImplemented" not in str(each.grad_fn)
    ]
    with_gradient = [n for n in differentiable if outputs[n].requires_grad]
    cotangents = {n: rng.uniform(0.5, 2.0, tuple(outputs[n].shape)) for n in differentiable}

    @jax.jit
    def results_and_gradients(arrays: dict[str, jax.Array]) -> Any:
        def chosen(floats: dict[str, jax.Array]) -> Any:
            results = jax.tree.leaves(run({**arrays, **floats}))
            return [results[n] for n in differentiable if n < len(results)], results

        floats = {key: arrays[key] for key in names}
        values, pullback, results = jax.vjp(chosen, floats, has_aux=True)
        given = [
            jnp.asarray(c, dtype=v.dtype) for c, v in zip(cotangents.values(), values, strict=True)
        ]
        return results, pullback(given)[0]

    results, gradients = results_and_gradients(arrays)
    if len(results) != len(outputs):
        return [f"{name}: `{text}` gives {len(results)} results for {len(outputs)}"]
    pairs = [(f"output {n}", r, o) for n, (r, o) in enumerate(zip(results, outputs, strict=True))]
    if with_gradient:
        theirs = torch.autograd.grad(
            [outputs[n] for n in with_gradient],
            variables,
            [torch.tensor(cotangents[n], dtype=outputs[n].dtype) for n in with_gradient],
            allow_unused=True,
        )
    else:
        theirs = [None] * len(variables)
    for key, variable, gradient in zip(names, variables, theirs, strict=True):
        expected = torch.zeros_like(variable) if gradient is None else gradient
        # At NaN there is no gradient to speak of: torch's is 0, or what came, as it happens.
        is_nan = variable.detach().isnan()
        got = jnp.where(jnp.asarray(is_nan.numpy()), 0, gradients[key])
        pairs.append((f"gradient of {key}", got, expected.masked_fill(is_nan, 0)))
    terms = max([1, *(each.numel() for each in [*inputs, *outputs])]) + UNITS
    scale = max([1.0, *(_largest(each) for each in [*inputs, *outputs])])
    for what, got, expected in pairs:
        expected = expected.detach().resolve_conj().numpy()
        got = np.asarray(got)
        if got.shape != expected.shape:
            problems.append(f"{name}: {what} of `{text}` has shape {got.shape}, {expected.shape}")
            continue
        tolerance = terms * EPSILON * max(scale, _largest(torch.tensor(expected)))
        with np.errstate(invalid="ignore"):
            same = np.isclose(got, expected, rtol=0, atol=tolerance, equal_nan=True)
        if not same.all():
            problems.append(f"{name}: {what} of `{text}`: {got} for {expected}")
    return problems


def _largest(tensor: torch.Tensor) -> float:
    values = tensor.detach().abs().double() if is_inexact(tensor) else tensor.detach().double()
    finite = values[torch.isfinite(values)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def differences(name: str, *args: Any, **kwargs: Any) -> list[str]:
    """Return every difference; of low precision, dtypes only are compared, for roundings differ."""
    found = types_differ(name, *args, **kwargs)
    if not found and not any(
        each.dtype in LOW_PRECISION for each in tensors([*args, *kwargs.values()])
    ):
        found += values_differ(name, *args, **kwargs)
    return found
