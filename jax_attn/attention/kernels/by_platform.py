"""Attention by one kernel for each platform; compiling the program settles which one runs.

A traced function may be compiled for a device other than this host's (`jax.export`, a topology of
absent devices). If the chosen kernels differ, all platforms' kernels are traced and the compiler
keeps one.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex
from jax.interpreters import batching, mlir

from jax_attn.attention.call import Call
from jax_attn.attention.kernels import dense
from jax_attn.attention.kernels.forward_mode import Floats, differentiable, pulled

Run = Callable[[Call], jax.Array]


def attention(runs: Mapping[str, Run], home: str, call: Call) -> jax.Array:
    """Compute softmax(scale·QKᵀ)·V by the kernel of the compiled program's platform; (B, T, N, Hv).

    runs: cpu, cuda and tpu → its kernel; any other platform uses the CPU's. home: the platform on
    which the program will most likely run.
    """
    if len({*runs.values()}) == 1:
        return runs[home](call)
    branches = {p: run if p == home else _away(p, run) for p, run in runs.items()}
    default = branches.pop("cpu")
    return lax.platform_dependent(call, default=default, **branches)


def _away(platform: str, run: Run) -> Run:
    """Return the kernel for a platform that is not home.

    Every platform's forward pass must return what any kernel keeps for its backward pass, as zeros
    for kernels that do not run; if forward and backward are compiled apart, these are real arrays.
    So here only the call is kept, and the backward pass repeats the forward. Forward mode is
    dense's, because the vendors' kernels have none.
    """
    only = None if platform == "cpu" else platform

    def backward(call: Call, _: jax.Array, d_out: jax.Array) -> Floats:
        return _only_on(only, functools.partial(pulled, run))(call, call.floats, d_out)

    return differentiable(_only_on(only, run), backward, dense.attention, keeps_outputs=False)


def _only_on(platform: str | None, fn: Callable) -> Callable:
    """Return `fn` for a branch that only `platform` takes; elsewhere it lowers to zeros.

    fn maps pytrees of arrays to pytrees of arrays. The result is not differentiable from outside. A
    program for several platforms at once (`jax.export`) lowers every branch of
    `lax.platform_dependent` for all of them, which fails for a kernel that exists on one platform.
    None: `fn` runs on any.
    """
    if platform is None:
        return fn

    def narrowed(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        jaxpr, shapes = jax.make_jaxpr(
            lambda *leaves: fn(*jax.tree.unflatten(tree, leaves)), return_shape=True
        )(*leaves)
        out = _ONLY_ON.bind(*leaves, platform=platform, jaxpr=jaxpr)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return narrowed


_ONLY_ON = jex.Primitive("only_on")
_ONLY_ON.multiple_results = True
_ONLY_ON.def_abstract_eval(lambda *_, platform, jaxpr: jaxpr.out_avals)


def _batched(
    args: Sequence, axes: Sequence, *, platform: str, jaxpr: jex.ClosedJaxpr
) -> tuple[list, list[int]]:
    out = _only_on(platform, jax.vmap(jex.jaxpr_as_fun(jaxpr), in_axes=tuple(axes)))(*args)
    return out, [0] * len(out)


def _lowered(
    here: str, ctx: mlir.LoweringRuleContext, *args: Any, platform: str, jaxpr: jex.ClosedJaxpr
) -> Sequence:
    def zeros(*_: Any) -> list[jax.Array]:
        return [jnp.zeros(aval.shape, aval.dtype) for aval in jaxpr.out_avals]

    if here != platform:
        return mlir.lower_fun(zeros)(ctx, *args)
    module = ctx.module_context.replace(platforms=(here,))
    there = ctx.replace(module_context=module, platforms=(here,))
    return mlir.lower_fun(jex.jaxpr_as_fun(jaxpr))(there, *args)


batching.primitive_batchers[_ONLY_ON] = _batched
mlir.register_lowering(_ONLY_ON, functools.partial(_lowered, "any"))
for _here in ("cuda", "tpu"):
    mlir.register_lowering(_ONLY_ON, functools.partial(_lowered, _here), platform=_here)
