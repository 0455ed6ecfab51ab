"""One call of attention, checked: what every kernel is given."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.attention import checks
from jax_attn.attention.dropout import Dropout
from jax_attn.attention.mask import Mask


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["query", "key", "value", "mask", "bias", "dropout"],
    meta_fields=["scale", "softcap", "precision"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """The arguments of attention, known to fit together. The arrays may be abstract.

    query (B, T, N, H), key (B, S, K, H), value (B, S, K, Hv), or None where only the weights
    are wanted; bias broadcasts to (B, N, T, S); the mask includes is_causal.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array | None
    mask: Mask
    bias: jax.Array | None
    scale: float
    softcap: float | None
    dropout: Dropout | None
    precision: object

    B = property(lambda self: self.query.shape[0])
    T = property(lambda self: self.query.shape[1])
    N = property(lambda self: self.query.shape[2])
    H = property(lambda self: self.query.shape[3])
    S = property(lambda self: self.key.shape[1])
    K = property(lambda self: self.key.shape[2])
    G = property(lambda self: self.N // self.K)

    @property
    def softmax_dtype(self):
        """float64 for float64 inputs, else float32: scores stay in it until they are weights."""
        return jnp.float64 if self.query.dtype == jnp.float64 else jnp.float32

    def on_device(self) -> "Call":
        """The same call with NumPy arrays made JAX arrays."""
        arrays = {name: getattr(self, name) for name in ("query", "key", "value", "bias")}
        made = {name: None if x is None else jnp.asarray(x) for name, x in arrays.items()}
        return dataclasses.replace(self, **made)


def checked_call(
    query,
    key,
    value,
    mask,
    *,
    is_causal,
    bias,
    scale,
    softcap,
    dropout,
    precision,
) -> tuple[Call | None, list[str]]:
    """The call, or None and everything that is wrong with it. value may be None."""
    problems = _array_problems(query, key, value)
    problems += checks.number_problems(scale, softcap)
    if not isinstance(is_causal, (bool, np.bool_)):
        problems.append(_causal_problem(is_causal))
    if mask is not None and not isinstance(mask, Mask):
        found = checks.boolean_problems("mask", mask)
        problems += found
        mask = Mask() if found else Mask.array(mask)
    if bias is not None:
        problems += _bias_problems(bias)
    if not (dropout is None or isinstance(dropout, Dropout)):
        problems.append(f"dropout: expected a Dropout, got {checks.describe(dropout)}")
    if problems:
        return None, problems

    mask = Mask() if mask is None else mask
    (B, T, N, H), S = query.shape, key.shape[1]
    problems += mask.problems(B, N, T, S)
    over_scores = [("bias", bias), ("dropout.keep", None if dropout is None else dropout.keep)]
    for name, x in over_scores:
        if x is not None and not checks.broadcasts(x.shape, (B, N, T, S)):
            problems.append(checks.broadcast_problem(name, x, (B, N, T, S), "(B, N, T, S)"))
    if problems:
        return None, problems
    return Call(
        query=query,
        key=key,
        value=value,
        mask=mask & Mask.causal() if is_causal else mask,
        bias=bias,
        scale=H**-0.5 if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
        dropout=dropout,
        precision=precision,
    ), []


def _array_problems(query, key, value) -> list[str]:
    arrays = {"query": query, "key": key}
    if value is not None:
        arrays["value"] = value
    axes = {"query": "BTNH", "key": "BSKH", "value": ["B", "S", "K", "Hv"]}
    problems = []
    for name, x in arrays.items():
        problems += checks.float_problems(name, x, 4, f"({', '.join(axes[name])})")
    if problems:
        return problems

    shapes = ", ".join(f"{name} {checks.describe(x)}" for name, x in arrays.items())
    if len({str(x.dtype) for x in arrays.values()}) > 1:
        problems.append(f"{', '.join(arrays)}: expected one dtype, got {shapes}")
    for name, x in arrays.items():
        for axis, size in zip(axes[name], x.shape, strict=True):
            if size == 0 and axis != "B":
                problems.append(f"{name}: expected {axis} ≥ 1, got {checks.describe(x)}")
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


def _causal_problem(is_causal) -> str:
    if isinstance(is_causal, jax.core.Tracer):
        return (
            "is_causal: expected a static Python bool, got a traced value: name it in jit's "
            "static_argnames, or close over it"
        )
    return f"is_causal: expected a static Python bool, got {checks.describe(is_causal)}"


def _bias_problems(bias) -> list[str]:
    if checks.is_array(bias) and str(bias.dtype) == "bool":
        return [f"bias: expected floats to add to the scores, got {checks.describe(bias)}: a mask"]
    return checks.float_problems("bias", bias)
