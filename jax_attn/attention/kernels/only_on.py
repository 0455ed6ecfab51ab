"""A function that is lowered for one platform alone.

A program for several platforms at once (`jax.export`) lowers every branch of
`lax.platform_dependent` for all of them, which fails for a kernel that exists on one platform.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import batching, mlir


def only_on(platform: str, fn: Callable) -> Callable:
    """`fn`, for a branch that only `platform` takes: elsewhere zeros stand in its place.

    Arrays in, arrays out (pytrees of them). Not to be differentiated from outside.
    """

    def narrowed(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        jaxpr, shapes = jax.make_jaxpr(
            lambda *leaves: fn(*jax.tree.unflatten(tree, leaves)), return_shape=True
        )(*leaves)
        out = _only_on.bind(*leaves, platform=platform, jaxpr=jaxpr)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return narrowed


_only_on = jex.Primitive("only_on")
_only_on.multiple_results = True


@_only_on.def_abstract_eval
def _(*args: Any, platform: str, jaxpr: jex.ClosedJaxpr) -> list:
    return jaxpr.out_avals


def _batched(
    args: Sequence, axes: Sequence, *, platform: str, jaxpr: jex.ClosedJaxpr
) -> tuple[list, list[int]]:
    fn = jax.vmap(jex.jaxpr_as_fun(jaxpr), in_axes=tuple(axes))
    out = only_on(platform, fn)(*args)
    return out, [0] * len(out)


batching.primitive_batchers[_only_on] = _batched


def _zeros(
    ctx: mlir.LoweringRuleContext, *args: Any, platform: str, jaxpr: jex.ClosedJaxpr
) -> Sequence:
    def stand_in(*_: Any) -> list[jax.Array]:
        return [jnp.zeros(aval.shape, aval.dtype) for aval in jaxpr.out_avals]

    return mlir.lower_fun(stand_in)(ctx, *args)


def _lowered(
    here: str, ctx: mlir.LoweringRuleContext, *args: Any, platform: str, jaxpr: jex.ClosedJaxpr
) -> Sequence:
    if here != platform:
        return _zeros(ctx, *args, platform=platform, jaxpr=jaxpr)
    module = ctx.module_context.replace(platforms=(here,))
    there = ctx.replace(module_context=module, platforms=(here,))
    return mlir.lower_fun(jex.jaxpr_as_fun(jaxpr))(there, *args)


mlir.register_lowering(_only_on, _zeros)
for _here in ("cuda", "tpu"):
    mlir.register_lowering(_only_on, functools.partial(_lowered, _here), platform=_here)
