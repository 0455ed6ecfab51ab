"""The call of Pallas's splash attention; the only file that imports it, which takes 0.3 seconds.

The kernel leaves to its caller: the scale; rows that may attend to nothing (it divides by their
sum, 0); lengths that are not multiples of its blocks; lengths per batch row.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as pallas
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from jax_attn.attention.call import Call

# Every row of scores gets a sink of this score, whose weight is dropped. Next to any other score
# its weight is exactly 0; in a row that may attend to nothing it takes all the weight, so the row
# gives 0 and, since exp(hidden − sink) is 0, has no gradient. The kernel gives hidden keys the
# score −2.4e38. Sinks of the call replace it.
SINK = -1e30

# The kernel's own default is blocks of 128, whose steps are too short to hide their memory reads.
# Published tunings are far larger: 1024 was a third faster than the default of one trainer on v6e
# (axlearn#958); another found larger blocks better, but not the largest (maxtext#898). A block that
# a band's edge crosses computes hidden scores in vain: so half of that below 4096. v5e, v6e and
# tpu7x accept these up to H = 256 in float32. Not measured here.
BLOCK, LONG, BLOCK_OF_LONG, LANES = 512, 4096, 1024, 128


def attention(call: Call, interpret: bool) -> jax.Array:
    """Compute `splash.attention`."""
    block_T, block_S = block(call.T), block(call.S)
    T, S = (-(-n // size) * size for n, size in ((call.T, block_T), (call.S, block_S)))
    kernel = pallas.make_splash_mha(
        masks.MultiHeadMask([_mask(call, T, S)] * call.N),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=pallas.BlockSizes(
            block_q=block_T,
            block_kv=block_S,
            block_q_dkv=block_T,
            block_kv_dkv=block_S,
            block_q_dq=block_T,
            block_kv_dq=block_S,
        ),
        attn_logits_soft_cap=call.softcap,
        interpret=interpret,
    )
    # Scaled in float32, then rounded to the query's dtype, as the matrix unit would round it.
    query = (call.query.astype(jnp.float32) * call.scale).astype(call.query.dtype)
    sinks = _sinks(call)
    out_BNTH = jax.vmap(lambda *arrays: kernel(*arrays, sinks))(
        _padded(query, T), _padded(call.key, S), _padded(call.value, S), _segments(call, T, S)
    )
    return out_BNTH.swapaxes(1, 2)[:, : call.T]


def block(n: int) -> int:
    """Return the block size over n: as few blocks as possible, no longer than necessary."""
    count = -(-n // (BLOCK if n < LONG else BLOCK_OF_LONG))
    return -(-n // (count * LANES)) * LANES


def _sinks(call: Call) -> jax.Array:
    """Return (N,) sinks: `SINK`, or the combined score of the call's own sinks and its zero key."""
    sinks = jnp.full((call.N,), SINK, jnp.float32)
    if call.sinks is not None:
        sinks = jnp.maximum(sinks, call.sinks.astype(jnp.float32))
    return _float32_gradient(jnp.logaddexp(sinks, 0) if call.add_zero_attn else sinks)


# The kernel returns the gradient of float32 sinks in its output's dtype; JAX expects float32.
@jax.custom_vjp
def _float32_gradient(sinks: jax.Array) -> jax.Array:
    return sinks


_float32_gradient.defvjp(lambda sinks: (sinks, None), lambda _, d: (d.astype(jnp.float32),))


def _mask(call: Call, T: int, S: int) -> masks.Mask:
    lo, hi = call.mask.static_band
    return masks.FullMask((T, S)) if lo is None and hi is None else Band((T, S), lo, hi)


@dataclass(frozen=True)
class Band(masks.Mask):
    """Mask lo ≤ j − i ≤ hi, computed in the kernel; blocks outside it are skipped."""

    sizes: tuple[int, int]
    lo: int | None
    hi: int | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.sizes

    @property
    def q_sequence(self) -> np.ndarray:
        return np.arange(self.sizes[0], dtype=np.int32)

    def mask_function(self, i: Any, j: Any) -> Any:
        """Return which keys j each query i sees."""
        edges = []
        if self.lo is not None:
            edges.append(j - i >= self.lo)
        if self.hi is not None:
            edges.append(j - i <= self.hi)
        return functools.reduce(operator.and_, edges)

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        rows, columns = block
        # Long sequences have thousands of blocks; for one that is all hidden or all visible, the
        # kernel only asks which.
        least, most = columns.start - (rows.stop - 1), columns.stop - 1 - rows.start
        lo, hi = (least if self.lo is None else self.lo), (most if self.hi is None else self.hi)
        if most < lo or least > hi:
            return np.zeros((1, 1), bool)
        if lo <= least and most <= hi:
            return np.ones((1, 1), bool)
        i, j = (np.arange(axis.start, axis.stop) for axis in block)
        return self.mask_function(i[:, None], j)


def _padded(x_BTNH: jax.Array, length: int) -> jax.Array:
    """Transpose (B, T, N, H) to (B, N, length, H), padded with zeros at the end."""
    more = length - x_BTNH.shape[1]
    return jnp.pad(x_BTNH, ((0, 0), (0, more), (0, 0), (0, 0))).swapaxes(1, 2)


def _segments(call: Call, T: int, S: int) -> pallas.SegmentIds | None:
    """Return ids that differ between segments and for keys past the lengths; None if not needed."""
    mask = call.mask
    ends_in_band = mask.hi is not None and call.T - 1 + mask.hi < call.S
    if mask.kv_lengths is None and mask.q_segments is None and (S == call.S or ends_in_band):
        return None
    q, kv = (jnp.zeros((call.B, n), jnp.int32) for n in (call.T, call.S))
    if mask.q_segments is not None:
        q, kv = (
            jnp.broadcast_to(jnp.asarray(ids), zeros.shape)
            for ids, zeros in ((mask.q_segments, q), (mask.kv_segments, kv))
        )
    # An id that no query has: above the largest, or below the least if that would overflow.
    largest, most = q.max(axis=1), np.iinfo(np.int32).max
    other = jnp.where(largest < most, largest + 1, q.min(axis=1) - 1)[:, None]
    if mask.kv_lengths is not None:
        lengths = jnp.broadcast_to(jnp.asarray(mask.kv_lengths), (call.B,))[:, None]
        kv = jnp.where(jnp.arange(call.S) < lengths, kv, other)
    padding = jnp.broadcast_to(other, (call.B, S - call.S))
    return pallas.SegmentIds(
        q=jnp.pad(q, ((0, 0), (0, T - call.T))), kv=jnp.concatenate([kv, padding], axis=1)
    )
