"""Inputs of a model: tokens, their number in each row, and their positions."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_attn.attention import Alibi, KVCache, Mask, checks
from jax_attn.attention.annotations import AnyArray
from jax_attn.families.traits import BlockTraits, EmbeddingTraits, PositionTraits
from jax_attn.models import packing


class Reads(NamedTuple):
    """Positions and masks that the layers of a model use.

    layers: their number. turns: rotary positions in any layer. stretches: rotary frequencies that
    depend on the length, in any layer. is_causal: all layers are causal. alibi: the same in every
    layer, or None.
    """

    layers: int
    turns: bool
    stretches: bool
    is_causal: bool
    alibi: Alibi | None

    @classmethod
    def of(cls, blocks: Sequence[BlockTraits]) -> "Reads":
        layers = [block.attention for block in blocks]
        alibis = [
            Alibi(a.sizes.num_heads, rounded=a.bias.rounded, **a.bias.fields)
            for a in layers
            if a.bias is not None and a.bias.kind == "alibi"
        ]
        return cls(
            layers=len(layers),
            turns=any(a.rotary is not None for a in layers),
            stretches=any(a.rotary is not None and a.rotary.stretches for a in layers),
            is_causal=all(a.is_causal for a in layers),
            alibi=alibis[0] if alibis else None,
        )


def problems(
    traits: EmbeddingTraits,
    reads: Reads,
    tokens: Any,
    lengths: Any,
    attention_mask: Any,
    types: Any,
    positions: Any,
    segments: Any,
    cache: Any,
) -> list[str]:
    """Say what is wrong with the arguments of a model's call.

    Values are checked only if they are known: under jit only shapes are.
    """
    if found := _integer_problems("tokens", tokens, traits.vocab_size):
        return found
    if len(tokens.shape) != 2 or 0 in tokens.shape:
        return [f"tokens: expected (B, T) integers, got {checks.summary(tokens)}"]
    B, T = tokens.shape
    malformed = [] if cache is None else _malformed(cache, reads.layers, B)
    found = malformed or []
    found += _row_problems(lengths, attention_mask, B, T, least=1 if cache is None else 0)
    found += (misfits := [] if segments is None else packing.segment_problems(segments, B, T))
    if segments is not None and not found:
        found += packing.return_problems(segments, lengths, attention_mask)
    if reads.stretches:
        why = "DynamicNTK's frequencies depend on a text's length"
        found += packing.several_text_problems(segments, why)
    if positions is None and not (malformed or misfits):
        found += _length_problems(traits, packing.longest_text(T, segments), cache)
    if types is not None:
        if not traits.types:
            found.append("types: expected None, because the model has no token types")
        else:
            found += _shape_problems("types", types, (B, T))
            found += _integer_problems("types", types, traits.types)
    if positions is not None:
        if getattr(positions, "shape", None) not in ((T,), (B, T)):
            found.append(
                f"positions: expected ({T},) or ({B}, {T}), got {checks.summary(positions)}"
            )
        if traits.positions is None and not reads.turns:
            found.append("positions: expected None, because the model does not use them")
        table = traits.positions
        most = None if table is None else table.rows - table.offset
        found += _integer_problems("positions", positions, most)
        if segments is None and not (found or cache):
            given = positions, lengths, attention_mask
            found += packing.position_problems(*given, is_causal=reads.is_causal)
    if cache is not None:
        found += cache_problems(reads)
        beside = {"attention_mask": attention_mask, "positions": positions, "segments": segments}
        found += [f"{n}: expected None with a cache" for n, x in beside.items() if x is not None]
    return found


def cache_problems(reads: Reads) -> list[str]:
    """Say why a model cannot use a cache."""
    found = []
    if not reads.is_causal:
        found.append("cache: expected a causal model, in which no token sees a later one")
    if reads.stretches:
        expected = "rotary frequencies that do not depend on the length"
        found.append(f"cache: expected {expected}, got DynamicNTK")
    return found


def _malformed(cache: Any, layers: int, B: int) -> list[str]:
    """Say why a cache does not have this number of layers and rows."""
    got = [type(cache).__name__]
    if isinstance(cache, tuple):
        got = [
            f"one of batch {c.filled.shape[0]}" if isinstance(c, KVCache) else type(c).__name__
            for c in cache
        ]
        if got == [f"one of batch {B}"] * layers:
            return []
    expected = f"a tuple of {layers} KVCaches of batch {B}, one for each layer"
    return [f"cache: expected {expected}, got {', '.join(got) or 'an empty tuple'}"]


def _length_problems(
    traits: EmbeddingTraits, T: int, cache: tuple[KVCache, ...] | None
) -> list[str]:
    if traits.positions is None:
        return []
    most, filled = longest(traits.positions), 0
    if cache and not isinstance(cache[0].filled, jax.core.Tracer):
        filled = int(np.asarray(cache[0].filled).max())
    if filled + T <= most:
        return []
    there = f", {filled} of them in the cache" if filled else ""
    return [f"tokens: expected at most {most} in a row, got {filled + T}{there}"]


def _row_problems(lengths: Any, attention_mask: Any, B: int, T: int, *, least: int) -> list[str]:
    """Say what is wrong with lengths and attention_mask; least: the smallest valid length."""
    if lengths is not None and attention_mask is not None:
        return ["lengths: expected one of lengths and attention_mask, got both"]
    if lengths is not None:
        found = _shape_problems("lengths", lengths, (B,))
        return found or _integer_problems("lengths", lengths, T + 1, least=least)
    if attention_mask is None:
        return []
    found = _shape_problems("attention_mask", attention_mask, (B, T))
    if found or isinstance(attention_mask, jax.core.Tracer):
        return found
    values = np.asarray(attention_mask)
    if not np.isin(values, (0, 1)).all():
        low, high = values.min(), values.max()
        return [f"attention_mask: expected only 0 and 1, got values from {low} to {high}"]
    empty = np.flatnonzero(~values.astype(bool).any(axis=1)).tolist()
    return [f"attention_mask: expected a 1 in every row, got none in rows {empty}"] if empty else []


def _shape_problems(name: str, x: Any, shape: tuple[int, ...]) -> list[str]:
    if getattr(x, "shape", None) == shape:
        return []
    return [f"{name}: expected {shape}, got {checks.summary(x)}"]


def _integer_problems(name: str, x: Any, count: int | None, *, least: int = 0) -> list[str]:
    """Say why x is not an array of integers n with least ≤ n < count."""
    if not checks.is_integer_array(x):
        return [f"{name}: expected an array of integers, got {checks.summary(x)}"]
    if isinstance(x, jax.core.Tracer) or not x.size:
        return []
    values = np.asarray(x)
    low, high = int(values.min()), int(values.max())
    if low >= least and (count is None or high < count):
        return []
    most = "" if count is None else f" to {count - 1}"
    return [f"{name}: expected {least}{most}, got {low} to {high}"]


def longest(traits: PositionTraits) -> int:
    """Return the largest number of tokens in a row that the table of positions allows."""
    return traits.rows - (traits.pad + 1 if traits.counts == "tokens" else traits.offset)


def mask(
    lengths: Int[AnyArray, " B"] | None,
    attention_mask: Int[AnyArray, "B T"] | None,
    segments: Int[AnyArray, "B T"] | None = None,
) -> Mask:
    """Return the mask that hides padding, and other texts of the row, in every layer."""
    seen = Mask() if segments is None else Mask.segments(segments, segments)
    if lengths is not None:
        return seen & Mask.lengths(lengths)
    if attention_mask is not None:
        return seen & Mask.array(jnp.asarray(attention_mask)[:, None, None, :].astype(bool))
    return seen


def position_rows(
    traits: PositionTraits,
    tokens: Int[AnyArray, "B T"],
    lengths: Int[AnyArray, " B"] | None,
    attention_mask: Int[AnyArray, "B T"] | None,
    positions: AnyArray | None,
    segments: AnyArray | None,
    filled_B: Int[Array, " B"] | None,
) -> Int[Array, "#B T"]:
    """Return the rows of the table of positions, as in transformers.

    positions: replace the computed ones. segments: the computed ones count each text from its
    begin. filled_B: the number of tokens already in the cache.
    """
    if positions is not None:
        return jnp.atleast_2d(jnp.asarray(positions)) + traits.offset
    T = tokens.shape[1]
    if filled_B is not None and lengths is not None:
        # Padding may lie behind the table's end, and NaN there would reach the tokens.
        rows = position_rows(traits, tokens, None, None, None, segments, filled_B)
        return jnp.where(jnp.arange(T) < jnp.asarray(lengths)[:, None], rows, 0)
    before = 0 if filled_B is None else filled_B[:, None]
    if traits.counts == "places":
        return places(T, segments) + before + traits.offset
    if traits.counts == "tokens":
        own = (tokens != traits.pad).astype(jnp.int32)
        return (packing.counted(own, segments) + before) * own + traits.pad
    own = jnp.ones(tokens.shape, jnp.int32)
    if attention_mask is not None:
        own = jnp.asarray(attention_mask).astype(jnp.int32)
    elif lengths is not None:
        own = (jnp.arange(T) < jnp.asarray(lengths)[:, None]).astype(jnp.int32)
    return (packing.counted(own, segments) + before) * own - 1 + traits.offset


def places(T: int, segments: Int[AnyArray, "B T"] | None) -> Int[Array, "#B T"]:
    """Return each token's place in its text, from 0."""
    if segments is None:
        return jnp.arange(T, dtype=jnp.int32)[None]
    return packing.counted(jnp.ones(segments.shape, jnp.int32), segments) - 1


def alibi_bias(
    alibi: Alibi,
    T: int,
    attention_mask: Int[AnyArray, "B T"] | None,
    segments: Int[AnyArray, "B T"] | None = None,
) -> Float[Array, "#B N 1 T"]:
    """Return ALiBi's bias (B or 1, N, 1, T): slope · the key's position, as in transformers.

    Only places that the mask shows are counted. A query's own position is the same for all its keys
    and cancels in the softmax.
    """
    own_BT = jnp.ones((1, T), jnp.int32)
    if attention_mask is not None:
        own_BT = jnp.asarray(attention_mask).astype(jnp.int32)
    position_BT = (packing.counted(own_BT, segments) - 1) * own_BT
    return alibi.slopes.bias(position_BT)


def last_states(
    hidden: Float[Array, "B T D"], lengths: Int[AnyArray, " B"] | None
) -> Float[Array, "B 1 D"]:
    """Return the state of each row's last token."""
    if lengths is None:
        return hidden[:, -1:]
    # By a sum, because a mesh of Explicit axes refuses to index sharded rows.
    is_last_BT = jnp.arange(hidden.shape[1]) == jnp.asarray(lengths)[:, None] - 1
    return jnp.where(is_last_BT[..., None], hidden, 0).sum(axis=1, keepdims=True)


def last_places(
    pad: int | None,
    tokens: Int[AnyArray, "B T"],
    lengths: Int[AnyArray, " B"] | None,
    attention_mask: Int[AnyArray, "B T"] | None,
) -> Int[Array, " B"]:
    """Return the index of each row's last token.

    pad: if given, only the tokens count, as in transformers: the last one that differs from pad.
    """
    B, T = tokens.shape
    if pad is not None:
        return jnp.argmax(jnp.arange(1, T + 1)[None] * (tokens != pad).astype(jnp.int32), axis=1)
    if lengths is not None:
        return jnp.asarray(lengths) - 1
    if attention_mask is not None:
        return T - 1 - jnp.argmax(jnp.asarray(attention_mask)[:, ::-1], axis=1)
    return jnp.full(B, T - 1)
