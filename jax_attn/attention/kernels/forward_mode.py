"""Derivatives of a kernel: reverse mode by its own backward pass, all others by the definition.

`jax.custom_vjp` has no forward mode, and JAX transposes the rule of a `jax.custom_jvp` as written.
Here the rule is a primitive that is linear in the tangents: its evaluation is the definition's
tangent, its transpose the kernel's backward pass.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from jax_attn.attention.broadcasting import broadcasting
from jax_attn.attention.call import Call

Leaves = Sequence[Any]
Floats = dict[str, jax.Array | None]
"""The arrays of a call that have a gradient, by name."""


def differentiable(
    forward: Callable[[Call], Any],
    backward: Callable[[Call, Any, Any], Floats],
    definition: Callable[[Call], Any],
    keeps_outputs: bool = True,
) -> Callable[[Call], Any]:
    """Return `forward`, whose derivative in reverse mode is `backward`.

    backward: (call, outputs, d_outputs) → the cotangents of the call's floats. definition: computes
    what forward does; by its derivatives, with their memory, forward mode and second derivatives
    are computed. keeps_outputs: whether backward reads the outputs; if not, it gets zeros.
    """

    @jax.custom_jvp
    def gradients(call: Call, outputs: Any, d_outputs: Any) -> Floats:
        return backward(call, outputs, d_outputs)

    @gradients.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple[Floats, Floats]:
        # The outputs have no part in it, because they follow from the call.
        (call, _, d_outputs), (d_call, _, dd_outputs) = primals, tangents
        at, moved = (call.floats, d_outputs), (d_call.floats, dd_outputs)
        second = jax.jvp(lambda *args: pulled(definition, call, *args), at, moved)[1]
        return gradients(*primals), second

    @jax.custom_jvp
    def run(call: Call) -> Any:
        return forward(call)

    @run.defjvp
    def _(primals: tuple[Call], tangents: tuple[Call]) -> tuple[Any, Any]:
        outputs = run(*primals)
        kept = outputs if keeps_outputs else jax.tree.map(jnp.zeros_like, outputs)
        push = functools.partial(pushed, definition)
        return outputs, _tangent(push, gradients, *primals, kept, tangents[0].floats)

    return run


def pushed(run: Callable[[Call], Any], call: Call, _: Any, d_floats: Floats) -> Any:
    """Return the tangent of `run`."""
    return jax.jvp(lambda floats: run(call.with_floats(floats)), (call.floats,), (d_floats,))[1]


def pulled(run: Callable[[Call], Any], call: Call, floats: Floats, d_outputs: Any) -> Floats:
    """Return the cotangents of the call's floats, by the derivative of `run`."""
    _, pull = jax.vjp(lambda floats: run(call.with_floats(floats)), floats)
    return pull(d_outputs)[0]


def _tangent(push: Callable, pull: Callable, call: Call, outputs: Any, d_floats: Floats) -> Any:
    """Return the outputs' tangent: a pytree like `outputs`, with the same shapes and dtypes.

    push: (call, outputs, d_floats) → d_outputs, linear in d_floats. It must be differentiable
    itself. pull: (call, outputs, d_outputs) → d_floats, its transpose.
    """
    trees = [jax.tree.structure(x) for x in (call, outputs, d_floats)]
    of_call, of_outputs, linear = (jax.tree.leaves(x) for x in (call, outputs, d_floats))

    def over_leaves(fn: Callable, last: int) -> Callable[[Leaves, Leaves, Leaves], Leaves]:
        @broadcasting
        def run(*leaves: Leaves) -> Leaves:
            used = (trees[0], trees[1], trees[last])
            return jax.tree.leaves(fn(*map(jax.tree.unflatten, used, leaves)))

        return run

    d_outputs = _TANGENT.bind(
        *of_call,
        *of_outputs,
        *linear,
        push=over_leaves(push, 2),
        pull=over_leaves(pull, 1),
        sizes=(len(of_call), len(of_outputs)),
    )
    return jax.tree.unflatten(trees[1], d_outputs)


_TANGENT = jex.Primitive("attention_tangent")
_TANGENT.multiple_results = True


def _split(args: Sequence[Any], sizes: tuple[int, int]) -> tuple[Leaves, Leaves, Leaves]:
    """Return the leaves of the call, of its outputs and of the tangents."""
    first, second = sizes[0], sum(sizes)
    return list(args[:first]), list(args[first:second]), list(args[second:])


def _pushed(*args: Any, push: Callable, pull: Callable, sizes: tuple[int, int]) -> Leaves:
    return push(*_split(args, sizes))


def _transposed(cts: Leaves, *args: Any, push: Callable, pull: Callable, sizes: Any) -> Leaves:
    call, outputs, linear = _split(args, sizes)
    pulled = pull(call, outputs, [ad.instantiate_zeros(ct) for ct in cts])
    wanted = [
        x if ad.is_undefined_primal(at) else None for x, at in zip(pulled, linear, strict=True)
    ]
    return [None] * sum(sizes) + wanted


def _differentiated(primals: Leaves, tangents: Leaves, **params: Any) -> tuple[Leaves, Leaves]:
    """Differentiate `push` with respect to every argument that has a tangent."""
    moves = [i for i, d in enumerate(tangents) if not isinstance(d, ad.Zero)]

    def moved(*some: Any) -> Leaves:
        args = list(primals)
        for i, x in zip(moves, some, strict=True):
            args[i] = x
        return _pushed(*args, **params)

    return jax.jvp(moved, [primals[i] for i in moves], [tangents[i] for i in moves])


def _batched(
    args: Leaves, axes: Sequence, *, push: Callable, pull: Callable, sizes: tuple[int, int]
) -> tuple[Leaves, list[int]]:
    pairs = list(zip(args, axes, strict=True))
    count = next(x.shape[axis] for x, axis in pairs if axis is not None)

    def front(x: jax.Array, axis: int | None) -> jax.Array:
        if axis is None:
            return jnp.broadcast_to(x, (count, *x.shape))
        return jnp.moveaxis(x, axis, 0)

    # A gradient has the shape of its tangent, so all of these must be batched.
    linear = [front(x, axis) for x, axis in pairs[sizes[0] :]]
    over = (list(axes[: sizes[0]]), 0, 0)
    out = _TANGENT.bind(
        *args[: sizes[0]],
        *linear,
        push=jax.vmap(push, over),
        pull=jax.vmap(pull, over),
        sizes=sizes,
    )
    return out, [0] * len(out)


_TANGENT.def_impl(_pushed)
_TANGENT.def_abstract_eval(lambda *avals, sizes, **_: _split(avals, sizes)[1])
ad.primitive_transposes[_TANGENT] = _transposed
ad.primitive_jvps[_TANGENT] = _differentiated
batching.primitive_batchers[_TANGENT] = _batched
mlir.register_lowering(_TANGENT, mlir.lower_fun(_pushed, multiple_results=True))
