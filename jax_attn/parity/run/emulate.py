"""Emulate the rounding of a matrix unit on a host that has none.

A TPU's MXU and an NVIDIA tensor core do not multiply float32: they round the operands of
a product, multiply the rounded values exactly and add up in float32. XLA:CPU has no such
step, whatever precision is requested. `emulate` runs a function's jaxpr with that step
inserted, so the rounding and its effect on everything downstream can be judged on a CPU.
Only products change: the device's own exp, tanh and reductions are not emulated, nor is
the order in which it adds.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

DEFAULT, HIGH, HIGHEST = lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST


class OperandRounding(NamedTuple):
    """An operand's rounding: a sum of at most `parts` numbers of `bits` explicit mantissa bits."""

    bits: int
    parts: int = 1


FLOAT32 = OperandRounding(bits=23)


class Unit(NamedTuple):
    """A device's rounding for each `precision` or algorithm that a product may request."""

    name: str
    rounds: dict[lax.Precision | lax.DotAlgorithmPreset, OperandRounding]
    strictest_governs: bool  # if a product names a precision for each operand


# mxu: read off what XLA:TPU schedules (v5e): float32 takes 1, 3 and 6 passes at DEFAULT,
# HIGH and HIGHEST, float16 1, 3 and 3, bfloat16 always 1; (DEFAULT, HIGHEST) takes 3 and
# (HIGH, HIGHEST) 5, so each operand is split by its own precision; no other algorithm is
# accepted. float16 has no pass of its own: at DEFAULT it loses three bits.
# tf32: XLA:GPU turns TF32 on where the larger of the two precisions is at most HIGH.
UNITS = {
    "mxu": Unit(
        "mxu",
        {
            DEFAULT: OperandRounding(bits=7),
            HIGH: OperandRounding(bits=7, parts=2),
            HIGHEST: OperandRounding(bits=7, parts=3),
            lax.DotAlgorithmPreset.BF16_BF16_F32: OperandRounding(bits=7),
            lax.DotAlgorithmPreset.BF16_BF16_F32_X3: OperandRounding(bits=7, parts=2),
            lax.DotAlgorithmPreset.BF16_BF16_F32_X6: OperandRounding(bits=7, parts=3),
        },
        strictest_governs=False,
    ),
    "tf32": Unit(
        "tf32",
        {
            DEFAULT: OperandRounding(bits=10),
            HIGH: OperandRounding(bits=10),
            HIGHEST: FLOAT32,
            lax.DotAlgorithmPreset.BF16_BF16_F32: OperandRounding(bits=7),
            lax.DotAlgorithmPreset.BF16_BF16_F32_X3: OperandRounding(bits=7, parts=2),
            lax.DotAlgorithmPreset.BF16_BF16_F32_X6: OperandRounding(bits=7, parts=3),
            lax.DotAlgorithmPreset.TF32_TF32_F32: OperandRounding(bits=10),
            lax.DotAlgorithmPreset.TF32_TF32_F32_X3: OperandRounding(bits=10, parts=2),
            lax.DotAlgorithmPreset.F16_F16_F32: FLOAT32,
            lax.DotAlgorithmPreset.F32_F32_F32: FLOAT32,
        },
        strictest_governs=True,
    ),
}


def emulate(fn: Callable, unit: str) -> Callable:
    """Return `fn` with the operands of every product rounded as `unit` rounds them.

    fn: a traceable function from (pytrees of) arrays to arrays; it is jitted here. unit: a
    name in `UNITS`. Each product's own `precision` applies, and so does
    `jax.default_matmul_precision` at the time of the call. float32, bfloat16, float16 and
    narrower are rounded and summed in float32; float64 and integers stay unchanged, because
    those devices compute them without these roundings.

    The result cannot be differentiated, because a derivative taken from outside would hold
    products without rounding: emulate the derivative, `emulate(jax.grad(fn), unit)`.

    Raises ValueError for an unknown unit; when called, NotImplementedError for operations
    that it cannot look into (Pallas kernels, shard_map, complex or ragged products) and for
    an algorithm that the device does not have.
    """
    if unit not in UNITS:
        raise ValueError(f"unit: expected one of {', '.join(UNITS)}, got {unit!r}")

    @jax.jit
    @functools.wraps(fn)
    def emulated(*args: Any, **kwargs: Any) -> Any:
        jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args, **kwargs)

        @jax.custom_jvp
        def run(*leaves: Any) -> list[Any]:
            return _run(jaxpr, leaves, UNITS[unit])

        @run.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            raise TypeError(
                "an emulated function cannot be differentiated: "
                f"emulate the derivative, emulate(jax.grad(fn), {unit!r})"
            )

        leaves = run(*jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return emulated


def _run(jaxpr: jex.Jaxpr | jex.ClosedJaxpr, args: Sequence[Any], unit: Unit) -> list[Any]:
    """Evaluate `jaxpr` with its products, and those of every jaxpr inside it, rounded."""
    values = dict(zip(jaxpr.constvars, getattr(jaxpr, "consts", ()), strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else values[atom]

    for equation in jaxpr.eqns:
        with equation.ctx.manager:
            results = _apply(equation, [read(atom) for atom in equation.invars], unit)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(equation: jex.JaxprEqn, args: list[Any], unit: Unit) -> Sequence[Any]:
    primitive, params = equation.primitive, equation.params
    if primitive.name in ("dot_general", "conv_general_dilated"):
        left, right = args
        return [_product(equation, left, right, unit)]
    if "precision" in params or primitive.name in ("shard_map", "pallas_call"):
        raise NotImplementedError(f"cannot emulate the products of {primitive.name}")
    if "call_jaxpr" in params:
        # Includes custom_jvp and custom_vjp functions: a derivative inside `fn` has already
        # applied their rules, and none can be taken from outside.
        return _run(params["call_jaxpr"], args, unit)
    params = {name: _rewritten(value, primitive.name, unit) for name, value in params.items()}
    results = primitive.bind(*args, **primitive.get_bind_params(params))
    return results if primitive.multiple_results else [results]


def _rewritten(value: Any, where: str, unit: Unit) -> Any:
    """Return a parameter of an equation with the jaxprs in it replaced by emulated ones."""
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(_rewritten(item, where, unit) for item in value)
    if not isinstance(value, jex.Jaxpr | jex.ClosedJaxpr):
        return value
    shapes = []
    for variable in value.invars:
        if not isinstance(aval := variable.aval, jax.core.ShapedArray):
            raise NotImplementedError(f"cannot emulate the body of {where}: it works on references")
        shapes.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type))
    traced = jax.make_jaxpr(lambda *args: _run(value, args, unit))(*shapes)
    # An open jaxpr (jax before 0.12) cannot hold constants; none arise here, because the
    # only numbers that rounding adds are parameters and literals.
    return traced if hasattr(value, "consts") else traced.jaxpr


def _product(equation: jex.JaxprEqn, a: jax.Array, b: jax.Array, unit: Unit) -> jax.Array:
    """Compute a matrix product or convolution as a float32 sum of products of operand parts."""
    aval: Any = equation.outvars[0].aval
    result = aval.dtype
    dtypes = (a.dtype, b.dtype, result)
    if any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes):
        raise NotImplementedError("cannot emulate a product of complex numbers")
    if jnp.float64 in dtypes or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return equation.primitive.bind(a, b, **equation.params)

    params = equation.params | {"precision": (HIGHEST, HIGHEST)}
    params["preferred_element_type"] = jnp.dtype(jnp.float32)
    round_a, round_b = _roundings(equation.params["precision"], unit)
    parts_a, parts_b = _split(a, round_a), _split(b, round_b)
    # Products of two small parts are smaller than the split's remainder, so they are not computed.
    depth = max(len(parts_a), len(parts_b))
    pairs = [(i, j) for i in range(len(parts_a)) for j in range(len(parts_b)) if i + j < depth]
    smallest_first = sorted(pairs, key=sum, reverse=True)
    *small, large = [
        equation.primitive.bind(parts_a[i], parts_b[j], **params) for i, j in smallest_first
    ]
    if not small:
        return large.astype(result)
    # An infinite operand leaves NaN, or infinities of either sign, in its small parts: ignore them.
    correction = functools.reduce(lax.add, small)
    return (jnp.where(jnp.isfinite(correction), correction, 0) + large).astype(result)


def _roundings(precision: Any, unit: Unit) -> tuple[OperandRounding, OperandRounding]:
    """Return the rounding of each operand for a product's `precision` parameter."""
    if not isinstance(precision, tuple):
        precision = (precision, precision)
    precisions = [DEFAULT if p in (None, lax.DotAlgorithmPreset.DEFAULT) else p for p in precision]
    for one in precisions:
        if one not in unit.rounds:
            raise NotImplementedError(f"{unit.name} has no {one}")
    if unit.strictest_governs and precisions[0] != precisions[1]:
        precisions = [max(precisions, key=lambda p: p.value)] * 2
    return unit.rounds[precisions[0]], unit.rounds[precisions[1]]


def _split(x: jax.Array, rounding: OperandRounding) -> list[jax.Array]:
    """Split x into float32 parts of `rounding.bits`, largest first, at most as many as it fills."""
    bits_in_x = jnp.finfo(x.dtype).nmant + 1
    parts, rest = [], x.astype(jnp.float32)
    for _ in range(min(rounding.parts, math.ceil(bits_in_x / (rounding.bits + 1)))):
        part = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=rounding.bits)
        parts.append(part)
        rest = rest - part
    return parts
