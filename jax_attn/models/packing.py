"""Rows that hold several texts: what each token sees, and its position in its own text."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_attn.attention import checks, integers
from jax_attn.attention.annotations import AnyArray

ONE_TEXT = "segments=jnp.zeros(tokens.shape, int) says that each row is one text"


def segment_problems(segments: Any, B: int, T: int) -> list[str]:
    """Say why this is not a segment id for each of T tokens in B rows."""
    if not checks.is_integer_array(segments) or segments.shape != (B, T):
        expected = f"({B}, {T}) integers, the text to which each token belongs"
        return [f"segments: expected {expected}, got {checks.summary(segments)}"]
    return integers.beyond_int32("segments", segments)


def return_problems(segments: Any, lengths: Any, attention_mask: Any) -> list[str]:
    """Say in which rows tokens of a text lie apart; nothing if that is not known, as under jit.

    Padding, whatever its ids, is no text.
    """
    if not are_known(segments, lengths, attention_mask):
        return []
    ids_BT = np.asarray(segments)
    with jax.ensure_compile_time_eval():
        shown_BT = np.asarray(_shown(ids_BT.shape, lengths, attention_mask))
    broken = [b for b, row in enumerate(ids_BT) if _returns(row, shown_BT[b])]
    expected = "segments: expected the tokens of each text one after the other"
    return [f"{expected}, but an id comes again in rows {broken}"] if broken else []


def several_text_problems(segments: Any, why: str) -> list[str]:
    """Say why no row may have several texts, unless it is known that none has."""
    if segments is None:
        return []
    if are_known(segments) and checks.is_integer_array(segments) and segments.ndim == 2:
        ids_BT = np.asarray(segments)
        if (ids_BT == ids_BT[:, :1]).all():
            return []
    return [f"segments: expected None, or one id in all of a row, because {why}"]


def each_apart(segments: AnyArray | None) -> AnyArray | None:
    """Return segments in which no id comes again: the texts of a row, numbered, if need be.

    If that is not known, as under jit, a text whose id came before is thus another text for the
    mask too, as it is for positions.
    """
    if segments is None:
        return None
    if are_known(segments) and not any(_returns(row) for row in np.asarray(segments)):
        return segments
    return jnp.cumsum(_begins(segments).astype(jnp.int32), axis=1)


def position_problems(
    positions: Any, lengths: Any, attention_mask: Any, *, is_causal: bool
) -> list[str]:
    """Say where positions begin again, or jump, in a call without segments.

    What depends on values that are not known, as under jit, is left to `as_one_text`.
    """
    if not are_known(positions, lengths, attention_mask):
        return []
    with jax.ensure_compile_time_eval():
        broken = ~np.asarray(is_one_text(positions, lengths, attention_mask, is_causal=is_causal))
    if not broken.any():
        return []
    rows = "" if np.ndim(positions) == 1 else f" in rows {np.flatnonzero(broken).tolist()}"
    expected = "expected each token's to exceed the last one's"
    if _must_follow(lengths, attention_mask, is_causal=is_causal):
        expected = "expected each token's to be the last one's plus 1"
    why = "several texts in a row need segments=, or they would see each other"
    return [f"positions: {expected}{rows}, without segments; {why}; {ONE_TEXT}"]


def are_known(*arrays: Any) -> bool:
    """Return whether the values of all arrays are known, as outside of jit."""
    return not any(isinstance(array, jax.core.Tracer) for array in arrays)


def is_one_text(
    positions: Int[AnyArray, "#B T"] | Int[AnyArray, " T"],
    lengths: Int[AnyArray, " B"] | None,
    attention_mask: Int[AnyArray, "B T"] | None,
    *,
    is_causal: bool,
) -> Bool[Array, "#B"]:
    """Return for each row whether its positions are those of one text.

    transformers cuts a row of a causal model, called without a mask and without a cache, wherever a
    position does not follow the last one; there, each must follow. With a mask it never cuts a row,
    and padding may lie between tokens: there, and in encoders, the tokens' positions must grow.
    """
    at = jnp.atleast_2d(jnp.asarray(positions)).astype(jnp.int32)
    if _must_follow(lengths, attention_mask, is_causal=is_causal):
        return jnp.all(at[:, 1:] == at[:, :-1] + 1, axis=1)
    shown = _shown(at.shape, lengths, attention_mask)
    before = jax.lax.cummax(_or_minus_one(at, shown), axis=1)[:, :-1]
    return jnp.all((at[:, 1:] > before) | ~shown[:, 1:], axis=1)


def as_one_text(
    tokens: Int[Array, "B T"],
    positions: AnyArray | None,
    lengths: AnyArray | None,
    attention_mask: AnyArray | None,
    segments: AnyArray | None,
    *,
    is_causal: bool,
) -> Int[Array, "B T"]:
    """Return tokens that read no row of a table, in rows of which `is_one_text` is false.

    Only where that is not known before the program runs: `position_problems` reports the others.
    """
    if positions is None or segments is not None or are_known(positions, lengths, attention_mask):
        return tokens
    is_one_B = is_one_text(positions, lengths, attention_mask, is_causal=is_causal)
    return _or_minus_one(tokens, is_one_B[:, None])


def longest_text(T: int, segments: Any) -> int:
    """Return the largest number of tokens in a text; 1 if that is not known, as under jit."""
    if segments is None:
        return T
    if not are_known(segments):
        return 1
    ids_BT = np.pad(np.asarray(segments), ((0, 0), (1, 1)))
    differs = ids_BT[:, 1:] != ids_BT[:, :-1]
    differs[:, [0, -1]] = True
    return max(int(np.diff(np.flatnonzero(row)).max()) for row in differs)


def counted(
    own_BT: Int[Array, "#B T"], segments: Int[AnyArray, "B T"] | None
) -> Int[Array, "#B T"]:
    """Return the sums of own_BT from the begin of each text to each place."""
    sums_BT = jnp.cumsum(own_BT, axis=1)
    if segments is None:
        return sums_BT
    before_BT = (sums_BT - own_BT) * _begins(segments).astype(sums_BT.dtype)
    return sums_BT - jax.lax.cummax(before_BT, axis=1)


def _begins(segments: Int[AnyArray, "B T"]) -> Bool[Array, "B T"]:
    """Return whether a text begins at each place, except the first."""
    ids_BT = jnp.asarray(segments)
    return jnp.pad(ids_BT[:, 1:] != ids_BT[:, :-1], ((0, 0), (1, 0)))


def _returns(ids_T: np.ndarray, shown_T: np.ndarray | None = None) -> bool:
    """Return whether an id comes again after another one, where both have tokens that are shown."""
    run_T = np.cumsum(np.diff(ids_T, prepend=ids_T[:1]) != 0)
    pairs = np.stack([ids_T, run_T], axis=1)[slice(None) if shown_T is None else shown_T]
    runs = np.unique(pairs, axis=0)
    return len(np.unique(runs[:, 0])) < len(runs)


def _shown(shape: tuple[int, ...], lengths: Any, attention_mask: Any) -> Bool[Array, "#B T"]:
    """Return which places are no padding."""
    if attention_mask is not None:
        return jnp.asarray(attention_mask).astype(bool)
    if lengths is not None:
        return jnp.arange(shape[1])[None] < jnp.asarray(lengths)[:, None]
    return jnp.ones(shape, bool)


def _or_minus_one(
    x: Int[Array, "*#shape"], is_kept: Bool[Array, "*#shape"]
) -> Int[Array, "*shape"]:
    """Return x, or -1 where it is not kept; not by `where`, which wants one sharding of both."""
    return (x + 1) * is_kept.astype(x.dtype) - 1


def _must_follow(lengths: Any, attention_mask: Any, *, is_causal: bool) -> bool:
    return is_causal and lengths is None and attention_mask is None
