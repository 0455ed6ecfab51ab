"""Round long tensors in one pass over memory, by XLA on the CPU.

Each step of NumPy or torch is a pass over memory, and a rounding has twenty steps. XLA fuses them
into one loop, which takes a fifth of the time; it compiles for each size, so short tensors use
NumPy. Both give the same numbers up to the last bit of float64.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from jax_attn.parity.judge.budget import Precision
from jax_attn.parity.run.modes.draws import GOLDEN, MIXED, PART, SCALE, SCALE_OF_PAIR, unused_bits

_NO_MESH = jax.sharding.Mesh(np.empty((), object), ())


@cache
def _cpu() -> jax.Device | None:
    """Return the device that the loops run on; None if JAX is configured without a CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def is_long(x: torch.Tensor) -> bool:
    """Return whether a tensor is rounded here: long, contiguous, float64, of a single run."""
    return (
        type(x) is torch.Tensor
        and x.dtype is torch.float64
        and x.numel() > PART
        and x.is_contiguous()
        and _cpu() is not None
    )


def stored(x: torch.Tensor, key: int, precision: Precision, roundoff: float) -> torch.Tensor:
    """Return what `DrawnRounding.stored_part` returns. roundoff: as for `Draws.alike`."""
    return _on_cpu(partial(_stored, precision=precision, roundoff=roundoff), key, x)


def summed(
    x: torch.Tensor, by: torch.Tensor, key: int, precision: Precision, roundoff: float
) -> torch.Tensor:
    """Return what `DrawnRounding.summed_part` returns. roundoff: as for `Draws.alike`."""
    return _on_cpu(partial(_summed, precision=precision, roundoff=roundoff), key, x, by)


def _on_cpu(fn: partial, key: int, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    # Settings for the user's own programs must not affect this one: on a mesh, its result would lie
    # on several devices.
    with (
        jax.set_mesh(_NO_MESH),
        jax.enable_x64(True),
        jax.default_device(_cpu()),
        jax.disable_jit(False),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
    ):
        flat = (a.detach().reshape(-1).numpy() for a in (x, *others))
        return torch.from_dlpack(fn(np.uint64(key), *flat)).view(x.shape)


@partial(jax.jit, static_argnames=("precision", "roundoff"))
def _stored(key: jax.Array, x: jax.Array, *, precision: Precision, roundoff: float) -> jax.Array:
    drawn = _drawn(_hashed(x, key, roundoff), jnp.int64, SCALE)
    return _where_finite(x + _of_storing(x, precision) * drawn, x)


@partial(jax.jit, static_argnames=("precision", "roundoff"))
def _summed(
    key: jax.Array, x: jax.Array, by: jax.Array, *, precision: Precision, roundoff: float
) -> jax.Array:
    bits = _hashed(x, key, roundoff)
    of_sum, of_storing = (
        _drawn(half.astype(jnp.uint32), jnp.int32, SCALE_OF_PAIR)
        for half in (bits >> np.uint64(32), bits)
    )
    moved = _where_finite(x + by.astype(jnp.float64) * of_sum, x)
    stored = _where_finite(moved + _of_storing(moved, precision) * of_storing, moved)
    return jnp.where(by == 0, x, stored)


def _hashed(x: jax.Array, key: jax.Array, roundoff: float) -> jax.Array:
    bits = (lax.bitcast_convert_type(x, jnp.uint64) + key) >> np.uint64(unused_bits(roundoff))
    bits *= GOLDEN
    return (bits ^ (bits >> np.uint64(32))) * MIXED


def _drawn(bits: jax.Array, integer: jnp.dtype, scale: float) -> jax.Array:
    return lax.bitcast_convert_type(bits, integer).astype(jnp.float64) * scale


def _of_storing(x: jax.Array, precision: Precision) -> jax.Array:
    return jnp.where(x == 0, 0.0, jnp.maximum(jnp.abs(precision.store * x), precision.tiny))


def _where_finite(moved: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(moved), moved, x)
