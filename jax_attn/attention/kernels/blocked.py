"""Attention tile by tile: no T×S array, forward or backward, on any backend."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jax_attn.attention.call import Call
from jax_attn.attention.kernels import dense, forward_mode, partial_softmax, tile_loops
from jax_attn.attention.kernels.forward_mode import Floats
from jax_attn.attention.kernels.mesh import auto
from jax_attn.attention.kernels.tile import Tile, Tiles
from jax_attn.attention.kernels.tile_loops import Outputs
from jax_attn.attention.kernels.tile_sizes import tile_sizes
from jax_attn.attention.meshes import varying

# With fewer queries or scores a head dense may be faster: measured on XLA:CPU, batch 1 to 64, full
# and causal. At 64×64 blocked was 1.1 to 1.5 times as fast forward and 0.7 to 1.3 times as fast
# with the backward pass; from 128×128 up it was always faster.
FEW_QUERIES, FEW_SCORES = 32, 128 * 128
# On other devices, tiles in sequence leave most of the device idle: use them there only for calls
# whose scores would hardly fit in memory. Not measured.
MANY_BYTES = 2**30


def refusals(call: Call) -> list[str]:
    """Say why the call cannot be divided into tiles."""
    unknown = call.unknown_sizes("B", "T", "S", "N", "K")
    problems = [f"tiles need known sizes, not {unknown}"] if unknown else []
    return problems + call.mask.unread(*Tile.MASK)


def drawbacks(call: Call, platform: str) -> list[str]:
    """Say why dense is preferable for the call on the platform: cpu, cuda or tpu."""
    if platform != "cpu":
        size = call.B * call.N * call.T * call.S * jnp.dtype(call.softmax_dtype).itemsize
        fit = f"dense is preferred on {platform} while its scores fit in 1 GiB"
        return [f"{fit}, here {size / 2**20:.0f} MiB"] if size <= MANY_BYTES else []
    if call.T < FEW_QUERIES:
        return [f"dense is as fast for fewer than {FEW_QUERIES} queries, here {call.T}"]
    if call.T * call.S < FEW_SCORES:
        return [f"dense may be faster below {FEW_SCORES} scores a head, here {call.T}·{call.S}"]
    return []


def attention(call: Call, tiles: Tiles | None = None) -> jax.Array:
    """Compute softmax(scale·QKᵀ)·V with all options of the call, by default in its `tile_sizes`."""
    if call.dropout is not None and call.dropout.rate in (0, 1):
        if call.dropout.rate:
            return jnp.zeros((*call.query.shape[:3], call.Hv), call.query.dtype)
        call = dataclasses.replace(call, dropout=None)
    if call.B == 0:
        return dense.attention(call)  # there are no tiles
    out, *sums = with_sums(call.without_extra_keys(), tiles)
    if call.has_extra_keys:
        out = _with_extra_keys(call, out, *sums)
    return out.astype(call.query.dtype)


def with_sums(call: Call, tiles: Tiles | None = None) -> Outputs:
    """Return what `dense.with_sums` returns, for a call without extra keys and with B ≥ 1."""
    tiles = tile_sizes(call) if tiles is None else tiles.within(call)
    forward, backward = (functools.partial(each, tiles) for each in (_outputs, _gradients))
    run = forward_mode.differentiable(forward, backward, definition=dense.with_sums)
    return run(varying(call, call))


# Compiled, because eager calls would compile their loops each time: JAX caches a loop by its
# functions, which are new objects in each call.
_compiled = functools.partial(jax.jit, static_argnums=0, inline=True)


# Compiled, because jax_debug_infs takes the maximum of a query without keys for an error.
@functools.partial(jax.jit, inline=True)
def _with_extra_keys(call: Call, *outputs: jax.Array) -> jax.Array:
    attended = partial_softmax.of_sums(call, *outputs)
    return attended.merged(partial_softmax.of_extra_keys(call)).mean()


@_compiled
def _outputs(tiles: Tiles, call: Call) -> Outputs:
    return auto.outputs(functools.partial(tile_loops.outputs, tiles), call)


@_compiled
def _gradients(tiles: Tiles, call: Call, outputs: Outputs, d_outputs: Outputs) -> Floats:
    """Return the cotangents of query, key, value and bias."""
    run = functools.partial(tile_loops.gradients, tiles)
    grads = auto.gradients(run, call, outputs, d_outputs)
    return jax.tree.map(lambda x, grad: grad.astype(x.dtype), call.floats, grads)
