"""Masks: which keys each query may attend to, stated without writing the pairs out."""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_attn.attention import checks, integers
from jax_attn.attention.annotations import AbstractArray, AnyArray
from jax_attn.attention.broadcasting import broadcasting

# An end of a band: one for all batch rows, or one for each.
Band = int | AnyArray


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """Pairs (query i, key j) that may attend: all conditions that are set must hold.

    - a band, lo ≤ j − i ≤ hi; each end is an int (static) or an integer array () or (B,) (traced);
    - j < kv_lengths, an integer array () or (B,);
    - q_segments[b, i] == kv_segments[b, j], integer arrays (B, T) and (B, S);
    - allowed, a boolean array (T, S) or (B, N, T, S), any axis possibly 1.

    ``Mask()`` lets every query attend to every key; ``a & b`` allows the pairs that both allow. A
    Mask is a pytree, so it can be an argument under jit, vmap, scan and grad. Build one with the
    constructors below, which check their arguments; ``None`` means "no condition". Distances and
    lengths above 2³⁰ are clipped to 2³⁰; segment ids must fit in int32.
    """

    lo: int | Int[AnyArray, "#B"] | None = None
    hi: int | Int[AnyArray, "#B"] | None = None
    kv_lengths: Int[AnyArray, "#B"] | None = None
    q_segments: Int[AnyArray, "#B T"] | None = None
    kv_segments: Int[AnyArray, "#B S"] | None = None
    allowed: Bool[AnyArray, "*#BNTS"] | None = None

    # NumPy leaves `array & mask` to __rand__ below.
    __array_ufunc__ = None

    @staticmethod
    def causal(offset: int | Int[AnyArray, "#B"] = 0) -> "Mask":
        """Make key j visible to query i if j ≤ i + offset.

        offset: an int, or an integer array (B,), one per batch row. 0 aligns the top-left corners,
        as torch and jax.nn do; S − T aligns the bottom-right ones.
        """
        return Mask.window(None, 0, offset)

    @staticmethod
    def window(
        left: int | None, right: int | None, offset: int | Int[AnyArray, "#B"] = 0
    ) -> "Mask":
        """Make key j visible to query i if i + offset − left ≤ j ≤ i + offset + right.

        left and right: ints ≥ 0, or None for open. offset: as in `causal`.
        """
        problems = [
            f"{name}: expected an int ≥ 0, or None for open, got {size!r}"
            for name, size in (("left", left), ("right", right))
            if size is not None and not (checks.is_int(size) and size >= 0)
        ]
        problems += _integer_problems("offset", offset, (0, 1), "an int or one per batch row (B,)")
        checks.raise_all("Mask.window", problems)
        lo = None if left is None else integers.clipped(offset, -left)
        return Mask(lo=lo, hi=None if right is None else integers.clipped(offset, right))

    @staticmethod
    def lengths(kv_lengths_B: Int[AnyArray, "#B"]) -> "Mask":
        """Make key j of batch row b visible if j < kv_lengths_B[b]."""
        problems = _integer_problems("kv_lengths", kv_lengths_B, (0, 1), "(B,)")
        checks.raise_all("Mask.lengths", problems)
        lengths: Any = kv_lengths_B  # an array, so that jit compiles once for all lengths
        return Mask(
            kv_lengths=integers.clipped(np.asarray(lengths) if checks.is_int(lengths) else lengths)
        )

    @staticmethod
    def segments(q_BT: Int[AnyArray, "#B T"], kv_BS: Int[AnyArray, "#B S"]) -> "Mask":
        """Make query i and key j see each other if their segment ids are equal."""
        problems = _integer_problems("q_segments", q_BT, (2,), "(B, T)")
        problems += _integer_problems("kv_segments", kv_BS, (2,), "(B, S)")
        if not problems:
            problems += integers.beyond_int32("q_segments", q_BT)
            problems += integers.beyond_int32("kv_segments", kv_BS)
        checks.raise_all("Mask.segments", problems)
        (q_ids, kv_ids), problems = integers.in_one_dtype(q_segments=q_BT, kv_segments=kv_BS)
        checks.raise_all("Mask.segments", problems)
        return Mask(q_segments=q_ids, kv_segments=kv_ids)

    @staticmethod
    def array(allowed_BNTS: Bool[AbstractArray, "*#BNTS"]) -> "Mask":
        """Wrap a boolean array, True = attend, that broadcasts to (B, N, T, S); rank 2 or 4."""
        checks.raise_all("Mask.array", checks.boolean_problems("allowed", allowed_BNTS))
        allowed: Any = allowed_BNTS  # kernels convert it to a JAX array
        return Mask(allowed=allowed)

    @staticmethod
    def from_torch_mha(
        attn_mask: Any = None, key_padding_mask: Any = None, num_heads: int = 1
    ) -> "Mask":
        """Convert the boolean masks of torch.nn.MultiheadAttention, where True means *ignore*.

        attn_mask: (T, S) or (B·num_heads, T, S). key_padding_mask: (B, S).

        Float masks raise an ArgumentError, because torch adds them to the scores. Pass those as
        ``bias=``, in the form that the error shows, and build the Mask from the other argument.
        """
        attn_mask, key_padding_mask = _from_torch(attn_mask), _from_torch(key_padding_mask)
        problems = checks.count_problems(num_heads=num_heads)
        if attn_mask is not None:
            stacked = attn_mask.ndim == 3 and (
                bool(problems) or attn_mask.shape[0] % num_heads == 0
            )
            as_bias = "attn_mask, or attn_mask.reshape(B, num_heads, T, S)"
            problems += _torch_problems("attn_mask", attn_mask, as_bias)
            if attn_mask.ndim != 2 and not stacked:
                shapes, got = f"(T, S) or (B·{num_heads}, T, S)", checks.summary(attn_mask)
                problems.append(f"attn_mask: expected {shapes}, got {got}")
        if key_padding_mask is not None:
            as_bias = "key_padding_mask[:, None, None, :]"
            problems += _torch_problems("key_padding_mask", key_padding_mask, as_bias)
            if key_padding_mask.ndim != 2:
                got = checks.summary(key_padding_mask)
                problems.append(f"key_padding_mask: expected (B, S), got {got}")
        checks.raise_all("Mask.from_torch_mha", problems)
        mask = Mask()
        if attn_mask is not None:
            if attn_mask.ndim == 3:
                attn_mask = attn_mask.reshape(-1, num_heads, *attn_mask.shape[1:])
            mask &= Mask.array(~attn_mask)
        if key_padding_mask is not None:
            mask &= Mask.array(~key_padding_mask[:, None, None, :])
        return mask

    @staticmethod
    def from_zero_one(mask: Any) -> "Mask":
        """Convert a mask of 0 (hidden) and 1 (visible) in integers, floats or booleans.

        (T, S), (B, T, S) or (B, N, T, S). Rank 3 means one mask for each batch row, as in the
        published designs that take such masks. Other values are an error, unless the mask is
        traced, so that its values are unknown; then nonzero means visible.
        """
        mask = _from_torch(mask)
        problems = []
        if not checks.is_array(mask) or mask.ndim not in (2, 3, 4):
            problems.append(
                f"mask: expected (T, S), (B, T, S) or (B, N, T, S), got {checks.summary(mask)}"
            )
        elif not isinstance(mask, jax.core.Tracer):
            values = np.asarray(mask)
            strange = values[(values != 0) & (values != 1)]
            if strange.size:
                problems.append(f"mask: expected only 0 and 1, got {strange[0]} among its values")
        checks.raise_all("Mask.from_zero_one", problems)
        allowed = mask.astype(bool)
        return Mask.array(allowed[:, None] if allowed.ndim == 3 else allowed)

    def __and__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            raise TypeError(
                f"Mask & {type(other).__name__}: expected a Mask; wrap a boolean array in "
                "Mask.array(...)"
            )
        if self.q_segments is not None and other.q_segments is not None:
            raise ValueError(
                "Mask & Mask: both have segments; combine the two ids into one first, for example "
                "first · (1 + max of second) + second"
            )
        joined = self.conditions | other.conditions
        for name in self.conditions.keys() & other.conditions.keys():
            joined[name] = _meet(name, self.conditions[name], other.conditions[name])
        return dataclasses.replace(self, **joined)

    __rand__ = __and__

    @property
    def conditions(self) -> dict[str, Any]:
        """Fields that are set, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def is_open(self) -> bool:
        """True if no condition is set, so that every query attends to every key."""
        return not self.conditions

    def unread(self, *read: str) -> list[str]:
        """Say why a kernel that reads only these fields cannot serve this mask."""
        others = [_IN_WORDS.get(name, name) for name in self.conditions if name not in read]
        return [f"it takes no {words}" for words in dict.fromkeys(others)]

    @property
    def band_is_static(self) -> bool:
        """True if the ends of the band are plain numbers, equal for all batch rows."""
        return not (checks.is_array(self.lo) or checks.is_array(self.hi))

    @property
    def static_band(self) -> tuple[int | None, int | None]:
        """Ends lo and hi of a band that is static."""
        lo, hi = (None if x is None else operator.index(x) for x in (self.lo, self.hi))
        return lo, hi

    @broadcasting
    def materialize(self, T: int, S: int) -> Bool[Array, "#B #N T S"]:
        """Write the mask out as booleans, (B or 1, N or 1, T, S), True = attend."""
        read = ("lo", "hi", "kv_lengths", "q_segments", "kv_segments", "allowed")
        checks.raise_all("Mask.materialize", self.unread(*read))
        i_T1 = jnp.arange(T, dtype=jnp.int32)[:, None]
        j_1S = jnp.arange(S, dtype=jnp.int32)[None, :]
        allowed = jnp.ones((1, 1, T, S), bool)
        if self.lo is not None:
            allowed &= j_1S >= i_T1 + _per_row(self.lo)
        if self.hi is not None:
            allowed &= j_1S <= i_T1 + _per_row(self.hi)
        if self.kv_lengths is not None:
            allowed &= j_1S < _per_row(self.kv_lengths)
        if self.q_segments is not None:
            q_BT, kv_BS = jnp.asarray(self.q_segments), jnp.asarray(self.kv_segments)
            allowed &= q_BT[:, None, :, None] == kv_BS[:, None, None, :]
        if self.allowed is not None:
            allowed &= jnp.asarray(self.allowed)
        return allowed

    def problems(self, B: int, N: int, T: int, S: int) -> list[str]:
        """Say why this mask does not fit arrays of these sizes; empty if it does."""
        wanted = (
            ("band", self.lo, "(B,)", (B,)),
            ("band", self.hi, "(B,)", (B,)),
            ("lengths", self.kv_lengths, "(B,)", (B,)),
            ("q_segments", self.q_segments, "(B, T)", (B, T)),
            ("kv_segments", self.kv_segments, "(B, S)", (B, S)),
            ("array", self.allowed, "(B, N, T, S)", (B, N, T, S)),
        )
        problems = [
            problem
            for name, x, axes, shape in wanted
            if checks.is_array(x)
            for problem in checks.broadcast_problems(f"mask ({name})", x, shape, axes)
        ]
        return list(dict.fromkeys(problems))

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[int | None, ...]]:
        static = tuple(value if checks.is_int(value) else None for value in vars(self).values())
        leaves = [
            (jax.tree_util.GetAttrKey(name), None if checks.is_int(value) else value)
            for name, value in vars(self).items()
        ]
        return leaves, static

    @classmethod
    def tree_unflatten(cls, static: tuple[int | None, ...], leaves: Iterable[Any]) -> "Mask":
        pairs = zip(static, leaves, strict=True)
        values: list[Any] = [leaf if known is None else known for known, leaf in pairs]
        return cls(*values)

    def __repr__(self) -> str:
        parts = [
            f"{name}={checks.summary(value) if checks.is_array(value) else repr(value)}"
            for name, value in vars(self).items()
            if value is not None
        ]
        return f"Mask({', '.join(parts)})"


# Fields in words, for the reasons of kernels that do not read them.
_IN_WORDS = {
    "q_segments": "segments",
    "kv_segments": "segments",
    "allowed": "boolean array as a mask",
}
# Accepted types of a function's `mask`.
MaskLike = Mask | Bool[AnyArray, "#B #N #T #S"] | Bool[AnyArray, "#T #S"]


def _integer_problems(name: str, x: Any, ranks: tuple[int, ...], axes: str) -> list[str]:
    if isinstance(x, (list, tuple)):
        with contextlib.suppress(ValueError):  # rows of several lengths
            x = np.asarray(x)
    if checks.is_int(x) and 0 in ranks:
        return []
    if not checks.is_integer_array(x):
        return [f"{name}: expected integers, {axes}, got {checks.summary(x)}"]
    if len(x.shape) not in ranks:
        return [f"{name}: expected {axes}, got {checks.summary(x)}"]
    return []


# How `&` combines a condition that both masks have: for plain numbers, and for arrays.
_MEETS: dict[str, tuple[Callable[[int, int], int], Callable[..., jax.Array]]] = {
    "lo": (max, jnp.maximum),
    "hi": (min, jnp.minimum),
    "kv_lengths": (min, jnp.minimum),
    "allowed": (min, jnp.logical_and),
}


@broadcasting
def _meet(name: str, a: Any, b: Any) -> Any:
    """Return the combination of two masks' conditions of this name."""
    if name not in _MEETS:
        raise ValueError(f"Mask & Mask: both have {name}, and there is no rule to combine them")
    of_numbers, of_arrays = _MEETS[name]
    if isinstance(a, int) and isinstance(b, int):
        return of_numbers(a, b)
    a, b = (np.int32(x) if isinstance(x, int) else x for x in (a, b))
    try:
        np.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        raise ValueError(
            f"Mask & Mask: {name} {checks.summary(a)} and {checks.summary(b)} do not broadcast"
        ) from None
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in (a, b)):
        return jax.eval_shape(of_arrays, a, b)
    return of_arrays(a, b)


def _per_row(x: Band) -> int | jax.Array:
    """Return an int unchanged; an array () or (B,) as (B or 1, 1, 1, 1)."""
    return x if isinstance(x, int) else jnp.asarray(x).reshape(-1, 1, 1, 1)


def _from_torch(x: Any) -> Any:
    """Convert x, for example a torch tensor, to a NumPy array; return JAX arrays unchanged."""
    if x is None or isinstance(x, jax.Array):
        return x
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = x.float() if str(x.dtype) == "torch.bfloat16" else x  # NumPy has no bfloat16
    try:
        return np.asarray(x)
    except ValueError as error:
        raise checks.ArgumentError(f"mask: expected an array, got {checks.summary(x)}") from error


def _torch_problems(name: str, x: AnyArray, as_bias: str) -> list[str]:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return [
            f"{name}: expected boolean, True = ignore, got {checks.summary(x)}, which torch "
            f"adds to the scores: pass it as bias={as_bias}"
        ]
    if x.dtype != bool:
        return [f"{name}: expected boolean, True = ignore, got {checks.summary(x)}"]
    return []
