"""Compare a rule with torch's operator: values and gradients in float64, dtypes in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_attn.translate.rules.rule import bound
from parity_tests.helpers.operators import in_jax, operator

ROUNDOFF = 2.0**-53


def _mapped(value: Any, function: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return [_mapped(each, function) for each in value]
    return value


def _flat(value: Any) -> list[Any]:
    """Return the tensors of outputs or arguments; an empty one or None serves torch's gradient."""
    if isinstance(value, (list, tuple)):
        return [each for part in value for each in _flat(part)]
    return [value] if isinstance(value, (torch.Tensor, jax.Array)) else []


def _doubled(name: str, value: Any) -> Any:
    """Widen tensors; running statistics are the only ones to which torch gives no gradient."""

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
        doubled = tensor.detach().clone().to(wide.get(tensor.dtype, tensor.dtype))
        varied = doubled.dtype.is_floating_point or doubled.dtype.is_complex
        return doubled.requires_grad_(varied and not name.startswith("running"))

    return _mapped(value, twin)


def dtypes(name: str, *args: Any, **kwargs: Any) -> None:
    """Assert that shapes and dtypes are torch's, without x64: an int64 of torch is an int32."""
    wanted = _flat(operator(name)(*args, **kwargs))
    run, arrays, text = in_jax(name, *args, **kwargs)
    got = jax.tree.leaves(jax.eval_shape(run, arrays))
    for theirs, ours in zip(wanted, got, strict=False):
        dtype = str(theirs.dtype).removeprefix("torch.").replace("int64", "int32")
        assert (tuple(theirs.shape), dtype) == (ours.shape, str(ours.dtype)), text


def compare(
    name: str, *args: Any, roundoff: float = ROUNDOFF, outputs: int | None = None, **kwargs: Any
) -> str:
    """Assert that a rule computes what torch's operator does, and return its text.

    Args:
      name: the operator, such as `aten.add.Tensor`.
      args: its arguments, with tensors in float32, which are compared in float64.
      roundoff: of the dtype in which the expression computes.
      outputs: how many outputs to compare, from the first; by default all of them.
      kwargs: its arguments by name.
    """
    dtypes(name, *args, **kwargs)
    kwargs = {key: _doubled(key, each) for key, each in bound(operator(name), args, kwargs).items()}
    theirs = _flat(operator(name)(**kwargs))[:outputs]
    with jax.enable_x64(True):
        run, arrays, text = in_jax(name, **kwargs)
        arguments = _flat(list(kwargs.values()))
        inputs = [each for each in arguments if each.requires_grad]
        varied = {
            key: arrays[key]
            for key, each in zip(arrays, arguments, strict=True)
            if each.requires_grad
        }

        def outputs_of(varied: Any) -> list[jax.Array]:
            return jax.tree.leaves(run({**arrays, **varied}))[: len(theirs)]

        ours, pull = jax.vjp(outputs_of, varied)
        assert len(ours) == len(theirs), text
        generator = torch.Generator().manual_seed(len(text))
        weights = [
            torch.randn(each.shape, dtype=each.dtype, generator=generator)
            if each.requires_grad
            else None
            for each in theirs
        ]
        size = sum(each.numel() for each in arguments)
        _judge(theirs, ours, size, roundoff, text)
        total = sum(
            (each.conj() * weight).real.sum()
            for each, weight in zip(theirs, weights, strict=True)
            if weight is not None
        )
        if not inputs or not isinstance(total, torch.Tensor):
            return text
        gradients = torch.autograd.grad(total, inputs, allow_unused=True)
        cotangents = [
            np.zeros(
                x.shape, x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jax.dtypes.float0
            )
            if weight is None
            else weight.conj().resolve_conj().numpy()
            for x, weight in zip(ours, weights, strict=True)
        ]
        (pulled,) = pull(cotangents)
        wanted = [
            torch.zeros_like(x) if g is None else g.conj().resolve_conj()
            for x, g in zip(inputs, gradients, strict=True)
        ]
        _judge(wanted, [pulled[key] for key in varied], size, roundoff, f"gradient of {text}")
    return text


def _judge(
    wanted: list[torch.Tensor], got: list[jax.Array], size: int, roundoff: float, text: str
) -> None:
    """Assert equality up to the rounding of `size` terms, as large as the largest value."""
    for theirs, ours in zip(wanted, got, strict=True):
        expected, array = theirs.detach().resolve_conj().numpy(), np.asarray(ours)
        assert expected.shape == array.shape, text
        if not np.issubdtype(expected.dtype, np.inexact):
            np.testing.assert_array_equal(array, expected, err_msg=text)
            continue
        finite = np.isfinite(expected)
        magnitude = max(1.0, np.abs(expected[finite]).max(initial=0.0))
        np.testing.assert_allclose(
            array, expected, rtol=0, atol=size * roundoff * magnitude, err_msg=text
        )
