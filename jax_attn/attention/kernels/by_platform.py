"""One call with a kernel for each platform; compiling the program settles which one runs.

A traced function may be compiled for a device other than this host's (`jax.export`, a topology
that is not there). Where the kernels to choose differ, every platform's is traced; the compiler
keeps one.
"""

import functools
from collections.abc import Callable, Mapping

import jax
from jax import lax

from jax_attn.attention.call import Call
from jax_attn.attention.kernels import dense
from jax_attn.attention.kernels.only_on import only_on

Run = Callable[[Call], jax.Array]
Floats = dict[str, jax.Array | None]


def attention(runs: Mapping[str, Run], home: str, call: Call) -> jax.Array:
    """softmax(scale·QKᵀ)·V by the kernel of the platform compiled for; (B, T, N, Hv).

    runs: cpu, cuda and tpu → its kernel; what is none of them takes the CPU's. home: the platform
    on which the program most likely runs.
    """
    away = {p: functools.partial(_apart, None if p == "cpu" else p) for p in runs}
    branches = {p: run if p == home else functools.partial(away[p], run) for p, run in runs.items()}
    default = branches.pop("cpu")
    return lax.platform_dependent(call, default=default, **branches)


# What a kernel keeps for its backward pass, every platform's forward pass must return, as zeros
# where another runs; where forward and backward are compiled apart, these are real arrays. So
# away from home nothing is kept but the call, and the backward pass begins with the forward.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apart(platform: str | None, run: Run, call: Call) -> jax.Array:
    return _lowered(platform, run)(call)


def _apart_fwd(platform: str | None, run: Run, call: Call) -> tuple[jax.Array, Call]:
    return _apart(platform, run, call), call


def _apart_bwd(platform: str | None, run: Run, call: Call, d_out: jax.Array) -> tuple[Call]:
    return (_gradients(platform, run, call, d_out),)


_apart.defvjp(_apart_fwd, _apart_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gradients(platform: str | None, run: Run, call: Call, d_out: jax.Array) -> Call:
    """The cotangents of query, key, value and bias, in a Call whose other arrays are None."""
    return _lowered(platform, functools.partial(_pulled, run))(call, call.floats, d_out)


def _gradients_fwd(
    platform: str | None, run: Run, call: Call, d_out: jax.Array
) -> tuple[Call, Callable]:
    """A second derivative is dense's: the vendors' kernels have none."""
    first = _gradients(platform, run, call, d_out)
    _, pull = jax.vjp(functools.partial(_pulled, dense.attention, call), call.floats, d_out)
    return first, pull


def _gradients_bwd(
    platform: str | None, run: Run, pull: Callable, d_first: Call
) -> tuple[Call, jax.Array]:
    del platform, run
    d_floats, d_d_out = pull(d_first)
    return d_first.with_floats(d_floats), d_d_out


_gradients.defvjp(_gradients_fwd, _gradients_bwd)


def _lowered(platform: str | None, fn: Callable) -> Callable:
    """`fn` for that platform alone; for any, where there is none."""
    return fn if platform is None else only_on(platform, fn)


def _pulled(run: Run, call: Call, floats: Floats, d_out: jax.Array) -> Call:
    _, pull = jax.vjp(lambda floats: run(call.with_floats(floats)), floats)
    return call.cotangent(pull(d_out)[0])
