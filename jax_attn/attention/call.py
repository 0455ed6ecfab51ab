"""A checked call of attention: the argument of every kernel."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.attention import checks
from jax_attn.attention.annotations import AbstractArray
from jax_attn.attention.dropout import Dropout
from jax_attn.attention.mask import Mask
from jax_attn.attention.position_bias import DistanceBias, KeySlopes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "query",
        "key",
        "value",
        "mask",
        "bias",
        "dropout",
        "bias_k",
        "bias_v",
        "sinks",
        "position_bias",
    ],
    meta_fields=["scale", "softcap", "precision", "add_zero_attn"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """Arguments of attention, checked to fit together. The arrays may be abstract.

    query (B, T, N, H), key (B, S, K, H), value (B, S, K, Hv); bias broadcasts to (B, N, T, S); the
    mask includes is_causal. If only the weights are wanted, the value is the key.

    There may be extra keys after the S, which every query sees regardless of mask and bias: a
    learned key bias_k (K, H) with its value bias_v (K, Hv), a key and value of 0 if add_zero_attn,
    and sinks (N,), scores that take weight and have no value. The first two have dropout and
    columns of weights after the S, in this order; sinks have neither.

    position_bias: a bias by the positions of queries and keys, for attention with a cache, which
    knows them.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    mask: Mask
    bias: jax.Array | None
    scale: float
    softcap: float | None
    dropout: Dropout | None
    precision: jax.lax.PrecisionLike
    bias_k: jax.Array | None = None
    bias_v: jax.Array | None = None
    sinks: jax.Array | None = None
    add_zero_attn: bool = False
    position_bias: KeySlopes | DistanceBias | None = None

    B = property(lambda self: self.query.shape[0])
    T = property(lambda self: self.query.shape[1])
    N = property(lambda self: self.query.shape[2])
    H = property(lambda self: self.query.shape[3])
    S = property(lambda self: self.key.shape[1])
    K = property(lambda self: self.key.shape[2])
    G = property(lambda self: self.N // self.K)
    Hv = property(lambda self: self.value.shape[3])

    def unknown_sizes(self, *axes: str) -> str:
        """Return those of the axes whose sizes are symbolic, with their symbols, as text."""
        sizes = {axis: getattr(self, axis) for axis in axes}
        return ", ".join(f"{axis} = {n}" for axis, n in sizes.items() if not isinstance(n, int))

    @property
    def softmax_dtype(self) -> type[np.floating]:
        """Dtype of scores until they become weights: float64 for float64 inputs, else float32."""
        return np.float64 if self.query.dtype == jnp.float64 else np.float32

    @property
    def floats(self) -> dict[str, jax.Array | None]:
        """The arrays that have a gradient, by name; extra keys' arrays only if they are set."""
        floats = {name: getattr(self, name) for name in ("query", "key", "value", "bias")}
        extra = {name: getattr(self, name) for name in ("bias_k", "bias_v", "sinks")}
        return floats | {name: x for name, x in extra.items() if x is not None}

    @property
    def extra_columns(self) -> int:
        """Number of extra keys that have a column of weights."""
        return (self.bias_k is not None) + self.add_zero_attn

    @property
    def has_extra_keys(self) -> bool:
        """True if any key is added to the S keys."""
        return self.extra_columns > 0 or self.sinks is not None

    def without_extra_keys(self) -> "Call":
        """Return the call with only the S keys; a dropout.keep still has the extra columns."""
        nothing: dict[str, Any] = {"bias_k": None, "bias_v": None, "sinks": None}
        return dataclasses.replace(self, add_zero_attn=False, **nothing)

    def with_floats(self, floats: Mapping[str, jax.Array | None]) -> "Call":
        """Return the same call with these arrays in place of `floats`."""
        replaced: dict[str, Any] = dict(floats)
        return dataclasses.replace(self, **replaced)

    def on_device(self) -> "Call":
        """Return the same call with NumPy arrays converted to JAX arrays."""
        return self.with_floats(
            {name: None if x is None else jnp.asarray(x) for name, x in self.floats.items()}
        )


class ExtraKeys(NamedTuple):
    """Arguments that add extra keys to a call."""

    bias_k: AbstractArray | None = None
    bias_v: AbstractArray | None = None
    add_zero_attn: bool = False
    sinks: AbstractArray | None = None


NO_EXTRA_KEYS = ExtraKeys()


def checked_call(
    where: str,
    query: AbstractArray,
    key: AbstractArray,
    value: AbstractArray | None,
    mask: Mask | AbstractArray | None = None,
    is_causal: bool = False,
    bias: AbstractArray | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: Dropout | None = None,
    precision: jax.lax.PrecisionLike = None,
    extra: ExtraKeys = NO_EXTRA_KEYS,
    *,
    needs_value: bool = True,
    other_problems: Sequence[str] = (),
) -> Call:
    """Check the arguments of the function named `where`, and return its Call.

    needs_value: whether a missing value, or a bias_k without a bias_v, is a problem.
    other_problems: problems with the function's other arguments. Raises ArgumentError, which lists
    all of them.
    """
    problems = _array_problems(query, key, value)
    problems += checks.number_problems(scale, softcap)
    problems += checks.is_causal_problems(is_causal)
    if mask is not None and not isinstance(mask, Mask):
        mask_problems = checks.boolean_problems("mask", mask)
        problems += mask_problems
        mask = Mask() if mask_problems else Mask.array(mask)
    problems += checks.bias_problems(bias)
    problems += checks.precision_problems(precision)
    if not (dropout is None or isinstance(dropout, Dropout)):
        problems.append(f"dropout: expected a Dropout, got {checks.summary(dropout)}")
    mask = Mask() if mask is None else mask
    problems += _extra_problems(extra, needs_value)
    if not problems:
        (B, T, N, H), (_, S, K, _) = query.shape, key.shape
        problems += mask.problems(B, N, T, S)
        if bias is not None:
            problems += checks.broadcast_problems("bias", bias, (B, N, T, S), "(B, N, T, S)")
        if dropout is not None and dropout.keep is not None:
            E = (extra.bias_k is not None) + extra.add_zero_attn
            axes, whole = "(B, N, T, S + E)" if E else "(B, N, T, S)", (B, N, T, S + E)
            problems += checks.broadcast_problems("dropout.keep", dropout.keep, whole, axes)
        shapes = {"bias_k": ("(K, H)", (K, H)), "sinks": ("(N,)", (N,))}
        if value is not None:
            shapes["bias_v"] = "(K, Hv)", (K, value.shape[3])
        for name, (axes, shape) in shapes.items():
            x = getattr(extra, name)
            if x is not None and tuple(x.shape) != shape:
                problems.append(f"{name}: expected {axes} = {shape}, got {checks.summary(x)}")
            if x is not None and name != "sinks" and x.dtype != query.dtype:
                got = checks.summary(x)
                problems.append(f"{name}: expected the query's dtype {query.dtype}, got {got}")
    if value is None and needs_value:
        problems.append("value: expected an array (B, S, K, Hv), got None")
    checks.raise_all(where, [*problems, *other_problems])
    value = key if value is None else value
    extra = extra._replace(bias_v=extra.bias_k if extra.bias_v is None else extra.bias_v)
    # Not converted: kernels get JAX arrays only after `on_device`.
    arrays: dict[str, Any] = {"query": query, "key": key, "value": value, "bias": bias}
    arrays |= extra._asdict()
    return Call(
        mask=mask & Mask.causal() if is_causal else mask,
        scale=query.shape[3] ** -0.5 if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
        dropout=dropout,
        precision=precision,
        **arrays,
    )


def _extra_problems(extra: ExtraKeys, needs_value: bool) -> list[str]:
    """List the problems of the extra keys that can be seen without the other arguments."""
    problems = []
    given = [name for name, x in extra._asdict().items() if x is not None]
    for name in ("bias_k", "bias_v", "sinks"):
        problems += checks.float_problems(name, getattr(extra, name)) if name in given else []
    for name, other in (("bias_k", "bias_v"), ("bias_v", "bias_k")):
        if needs_value and other in given and name not in given:
            problems.append(f"{name}: expected together with {other}, got None")
    if not isinstance(extra.add_zero_attn, bool):
        got = checks.summary(extra.add_zero_attn)
        problems.append(f"add_zero_attn: expected a static Python bool, got {got}")
    return problems


def _array_problems(
    query: AbstractArray, key: AbstractArray, value: AbstractArray | None
) -> list[str]:
    arrays = {"query": query, "key": key} | ({} if value is None else {"value": value})
    axes = {"query": ("B", "T", "N", "H"), "key": ("B", "S", "K", "H")}
    axes["value"] = ("B", "S", "K", "Hv")
    problems = []
    for name, x in arrays.items():
        problems += checks.float_problems(name, x, 4, f"({', '.join(axes[name])})")
    if problems:
        return problems

    shapes = ", ".join(f"{name} {checks.summary(x)}" for name, x in arrays.items())
    if len({str(x.dtype) for x in arrays.values()}) > 1:
        problems.append(f"{', '.join(arrays)}: expected one dtype, got {shapes}")
    for name, x in arrays.items():
        for axis, size in zip(axes[name], x.shape, strict=True):
            if size == 0 and axis != "B":
                problems.append(f"{name}: expected {axis} ≥ 1, got {checks.summary(x)}")
    if len({x.shape[0] for x in arrays.values()}) > 1:
        problems.append(f"{', '.join(arrays)}: expected the same batch B, got {shapes}")
    if query.shape[3] != key.shape[3]:
        problems.append(f"query, key: expected the same head_dim H, got {shapes}")
    if value is not None and key.shape[1:3] != value.shape[1:3]:
        problems.append(f"key, value: expected the same length S and heads K, got {shapes}")
    if key.shape[2] and query.shape[2] % key.shape[2]:
        problems.append(
            f"query, key: expected query heads N a multiple of key/value heads K, got {shapes}"
        )
    return problems
