"""Compare results and gradients in float64, where a rule and torch differ by roundings alone."""

import re
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from helpers.rules.call import Call, attempted, is_inexact, mapped, tensors
from helpers.rules.operators import NAMES, as_numpy, in_jax, operator
from jax_attn.translate.rules.rule import bound

WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}

# Without passes that make a program fast, which runs but once.
QUICK = {"xla_llvm_disable_expensive_passes": True, "xla_cpu_parallel_codegen_split_count": 1}

# Elementary functions of torch and of XLA are within this many units of the last place.
UNITS = 16


# A file that is written holds 32 bits: where it names a dtype, the comparison means 64. A limit
# that it names so is that of a constant of the graph, which stays.
_IN_FLOAT64 = types.SimpleNamespace(
    **{
        **vars(jnp),
        "float32": jnp.float64,
        "complex64": jnp.complex128,
        "int32": jnp.int64,
        "finfo": lambda dtype: jnp.finfo(jnp.float32 if dtype is jnp.float64 else dtype),
    }
)


@contextmanager
def _in_float64() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with jax.enable_x64(True):
            yield
    finally:
        torch.set_default_dtype(default)


@dataclass
class _InTorch:
    """A call in float64: its arguments and results, cotangents by place, and gradients."""

    arguments: tuple[Any, Any, Any]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    cotangents: dict[int, torch.Tensor] = field(default_factory=dict)
    gradients: list[torch.Tensor] = field(default_factory=list)

    @property
    def variables(self) -> list[torch.Tensor]:
        return [each for each in self.inputs if each.requires_grad]


def _in_torch(call: Call) -> _InTorch:
    """Run torch in float64; what it has no gradient for, it says, and is a constant."""
    constants: set[int] = set()
    arguments = bound(operator(call.name), call.args, call.kwargs)
    for key, value in arguments.items():
        # A batch norm's statistics are no variables.
        constants |= {id(each) for each in tensors(value) if key.startswith("running")}
    while True:
        try:
            return _run_in_torch(call, constants)
        except RuntimeError as error:
            refused = re.search("not differentiable .* argument '(.*)'", str(error))
            if not refused:
                raise
            constants |= {id(each) for each in tensors(arguments[refused[1]])}


def _run_in_torch(call: Call, constants: set[int]) -> _InTorch:
    def widened(each: Any) -> Any:
        if isinstance(each, torch.dtype):
            return WIDER.get(each, each)
        wide = each.detach().to(WIDER.get(each.dtype, each.dtype)).clone()
        return wide.requires_grad_(is_inexact(wide) and id(each) not in constants)

    args = [mapped(each, widened) for each in call.args]
    kwargs = {key: mapped(each, widened) for key, each in call.kwargs.items()}
    out = operator(call.name)(*args, **kwargs)
    inputs = tensors(list(bound(operator(call.name), args, kwargs).values()))
    ours = _InTorch((args, kwargs, out), inputs, tensors(out))
    generator = torch.Generator().manual_seed(7)
    for place, each in enumerate(ours.outputs[: call.outputs]):
        # What torch cuts off, as `detach`, gets a cotangent from JAX alone.
        if is_inexact(each) and "NotImplemented" not in str(each.grad_fn):
            drawn = torch.rand(each.shape, dtype=each.dtype, generator=generator)
            ours.cotangents[place] = 0.5 + 1.5 * drawn
    passing = [place for place in ours.cotangents if ours.outputs[place].requires_grad]
    if not passing or not ours.variables:
        ours.gradients = [torch.zeros_like(each) for each in ours.variables]
        return ours
    ours.gradients = list(
        torch.autograd.grad(
            [ours.outputs[place] for place in passing],
            ours.variables,
            [ours.cotangents[place] for place in passing],
            allow_unused=True,
            materialize_grads=True,
        )
    )
    return ours


@dataclass
class _Prepared:
    """A call as torch computes it in float64, and as it is written for JAX."""

    call: Call
    theirs: _InTorch
    run: Callable[..., tuple[Any, ...]]
    arrays: dict[str, np.ndarray]
    text: str
    error: Exception | None = None

    def with_gradients(self, arrays: dict[str, jax.Array]) -> Any:
        """Run the rule and pull torch's cotangents back."""
        theirs = self.theirs
        names = [
            key for key, each in zip(self.arrays, theirs.inputs, strict=True) if each.requires_grad
        ]

        def differentiable(variables: dict[str, jax.Array]) -> Any:
            results = self.run({**arrays, **variables}, {**NAMES, "jnp": _IN_FLOAT64})
            return [results[place] for place in theirs.cotangents], results

        variables = {key: arrays[key] for key in names}
        values, pullback, results = jax.vjp(differentiable, variables, has_aux=True)
        # JAX conjugates nothing, torch both cotangents and gradients.
        cotangents = [
            jnp.asarray(as_numpy(each.conj())).astype(value.dtype)
            for each, value in zip(theirs.cotangents.values(), values, strict=True)
        ]
        (pulled,) = pullback(cotangents)
        return results, [pulled[key].conj() for key in names]


def _prepared(call: Call) -> _Prepared:
    theirs = _in_torch(call)
    return _Prepared(call, theirs, *in_jax(call.rule, call.name, *theirs.arguments))


def _run(every: Sequence[_Prepared]) -> list[Any]:
    """Return the results and the gradients of each; what raises has an error instead."""

    def together(arrays: list[dict[str, jax.Array]]) -> list[Any]:
        return [
            attempted(each, each.with_gradients, its)
            for each, its in zip(every, arrays, strict=True)
        ]

    return jax.device_get(
        jax.jit(together, compiler_options=QUICK)([each.arrays for each in every])
    )


def _judged(prepared: _Prepared, ours: Any) -> list[str]:
    """Return where results, or gradients of floating inputs, differ in float64."""
    call, theirs, text = prepared.call, prepared.theirs, prepared.text
    if prepared.error is not None:
        return [f"raises {prepared.error!r} in `{text}`"]
    results, gradients = ours
    pairs = [
        (f"result {place}", got, as_numpy(expected))
        for place, (got, expected) in enumerate(zip(results, theirs.outputs, strict=True))
        if got is not None
    ]
    for place, (variable, got, gradient) in enumerate(
        zip(theirs.variables, gradients, theirs.gradients, strict=True)
    ):
        # At NaN there is no gradient to speak of: torch's is 0, or what came, as it happens.
        is_nan = variable.detach().isnan().numpy()
        expected = np.where(is_nan, 0, as_numpy(gradient))
        pairs.append((f"gradient {place}", np.where(is_nan, 0, np.asarray(got)), expected))
    # A value is made of so many terms at most, each rounded and as large as the largest.
    arrays = [as_numpy(each) for each in [*theirs.inputs, *theirs.outputs]]
    terms = sum(each.size for each in arrays) + UNITS
    scale = max([1.0, *map(_largest, arrays)])
    problems = []
    for what, got, expected in pairs:
        got = np.asarray(got)
        if got.shape != expected.shape:
            problems.append(f"{what} of `{text}` has shape {got.shape}, not {expected.shape}")
            continue
        allowed = terms * call.roundoff * max(scale, _largest(expected))
        with np.errstate(invalid="ignore"):
            wrong = ~np.isclose(got, expected, rtol=0, atol=allowed, equal_nan=True)
        if wrong.any():
            first = got[wrong][0], expected[wrong][0]
            problems.append(
                f"{what} of `{text}`: {wrong.sum()} of {wrong.size} differ by more than"
                f" {allowed:.1e}, as {first[0]} from {first[1]}"
            )
    return problems


def _largest(array: np.ndarray) -> float:
    """Return the largest finite magnitude."""
    values = np.abs(array.astype(np.complex128 if np.iscomplexobj(array) else np.float64))
    return float(values[np.isfinite(values)].max(initial=0.0))


def values_differ(calls: Sequence[Call]) -> list[list[str]]:
    """Return where results, or gradients of floating inputs, differ."""
    with _in_float64():
        prepared = [_prepared(call) for call in calls]
        results = _run(prepared)
    return [_judged(each, ours) for each, ours in zip(prepared, results, strict=True)]
