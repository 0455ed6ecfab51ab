"""Arguments of an attention module's calls: checks and defaults."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Int

from jax_attn.attention import Alibi, DistanceBias, Dropout, KVCache, checks, integers
from jax_attn.attention.annotations import AnyArray
from jax_attn.attention.rotary import DynamicNTK, Rotary, position_problems, rotate
from jax_attn.nn.relative_bias import RelativeBias

Positions = Int[AnyArray, "#B T"] | Int[AnyArray, " T"]


class Placement(NamedTuple):
    """Positions of queries and keys. alone: no key was given, so both have the same."""

    positions: Positions | None
    key_positions: Positions | None = None
    alone: bool = True


def sequences(module: Any, **inputs: Any) -> list[jax.Array]:
    """Check query, key and, if named, value, and return them; a missing one is the array before it.

    module: provides embed_dim, kdim and vdim. Raises ArgumentError with every problem.
    """
    axes = {"query": ("T", "embed_dim"), "key": ("S", "kdim"), "value": ("S", "vdim")}
    sizes: dict[str, dict[str, int]] = {"B": {}, "T": {}, "S": {}}
    problems, previous = [], ""
    for name, x in inputs.items():
        length, features = axes[name]
        size, note = getattr(module, features), ""
        if x is None and previous:
            x = inputs[name] = inputs[previous]
            note = f" ({previous}, because {name} is None)"
        own_problems = checks.float_problems(name, x, 3, f"(B, {length}, {features})")
        problems += own_problems
        if not own_problems:
            sizes["B"][name], sizes[length][name] = x.shape[:2]
            if x.shape[1] == 0:
                problems.append(f"{name}: expected {length} ≥ 1, got {checks.summary(x)}")
            if x.shape[2] != size:
                got = f"got {checks.summary(x)}{note}"
                problems.append(f"{name}: expected {features} = {size} features, {got}")
        previous = name
    for axis in ("B", "S"):
        if len(set(sizes[axis].values())) > 1:
            problems.append(f"{', '.join(sizes[axis])}: expected one {axis}, got {sizes[axis]}")
    checks.raise_all(type(module).__name__, problems)
    return [jnp.asarray(x) for x in inputs.values()]


def placement_problems(
    query: jax.Array, key: jax.Array, placement: Placement, rotary: Rotary | None
) -> list[str]:
    """Say what is wrong with the positions of query (B, T, …) and key (B, S, …)."""
    positions, key_positions, alone = placement
    arguments = {"positions": positions, "key_positions": key_positions}
    present = [name for name, at in arguments.items() if at is not None]
    if rotary is None:
        return [f"{name}: expected None, because the module has no rotary" for name in present]
    if alone and key_positions is not None:
        return ["key_positions: expected None without a key: the keys have the query's positions"]
    if not alone and len(present) == 1:
        (missing,) = arguments.keys() - present
        return [f"{missing}: expected together with {present[0]}, because a key is given"]
    problems = position_problems("positions", positions, *query.shape[:2])
    return problems + position_problems("key_positions", key_positions, *key.shape[:2])


def cast(parameter: nnx.Param | None, like: jax.Array) -> jax.Array | None:
    """Return the parameter's array in the dtype of `like`; None if there is no parameter."""
    return None if parameter is None else parameter[...].astype(like.dtype)


def scoring(module: Any, query: jax.Array) -> dict[str, Any]:
    """Return the options common to all attention functions; query: the projected one."""
    return {
        "scale": module.scale,
        "softcap": module.softcap,
        "precision": module.precision,
        "bias_k": cast(module.bias_k, query),
        "add_zero_attn": module.add_zero_attn,
        "sinks": cast(module.sinks, query),
    }


def turned(
    q_BTNH: jax.Array, k_BSKH: jax.Array, placement: Placement, rotary: Rotary
) -> tuple[jax.Array, jax.Array]:
    """Rotate queries and keys by their positions: those given, else 0 … T−1 and 0 … S−1."""
    positions, key_positions, alone = placement
    q_at = jnp.arange(q_BTNH.shape[1]) if positions is None else jnp.asarray(positions)
    if alone:
        return rotate(q_BTNH, q_at, rotary), rotate(k_BSKH, q_at, rotary)
    k_at = jnp.arange(k_BSKH.shape[1]) if key_positions is None else jnp.asarray(key_positions)
    # An empty batch has length 0.
    length = jnp.maximum(*(integers.clipped(at.max(initial=0), 1) for at in (q_at, k_at)))
    return rotate(q_BTNH, q_at, rotary, length=length), rotate(k_BSKH, k_at, rotary, length=length)


def with_position_bias(
    module: Any, bias: AnyArray | Alibi | None, q_BTD: jax.Array, k_BSD: jax.Array
) -> AnyArray | None:
    """Return the sum of the call's own bias, which may be an Alibi, and the position_bias."""
    if isinstance(bias, Alibi):
        bias = bias(q_BTD.shape[1], k_BSD.shape[1])
    if module.position_bias is None:
        return bias
    own_NTS = module.position_bias(q_BTD.shape[1], k_BSD.shape[1])
    if bias is None:
        return own_NTS
    if not (problems := checks.bias_problems(bias)):
        shape = (q_BTD.shape[0], module.num_heads, q_BTD.shape[1], k_BSD.shape[1])
        problems = checks.broadcast_problems("bias", bias, shape, "(B, N, T, S)")
    checks.raise_all(type(module).__name__, problems)
    with jax.numpy_dtype_promotion("standard"):  # a learned one has the parameters' dtype
        return bias + own_NTS


def cached_bias(
    module: Any, bias: Alibi | DistanceBias | None
) -> dict[str, Alibi | DistanceBias | None]:
    """Return the bias by position of a call with a cache, by its name in `attend_with_cache`."""
    own = module.position_bias if bias is None else bias
    own = own.by_distance() if isinstance(own, RelativeBias) else own
    return {"distances" if isinstance(own, DistanceBias) else "alibi": own}


def dropouts(
    module: Any,
    shape_BTD: tuple[int, ...],
    deterministic: bool | None,
    rngs: nnx.Rngs | nnx.RngStream | None,
    keep: AnyArray | None,
    out_keep: AnyArray | None,
) -> tuple[Dropout | None, Dropout | None]:
    """Return the Dropout of the weights and that of the output, None if there is none.

    module: provides the rates, and deterministic and rngs if the call has None. shape_BTD: the
    output's shape. The others are the call's arguments. Raises ArgumentError with every problem.
    """
    where, (deterministic, problems) = type(module).__name__, _deterministic(module, deterministic)
    if not (rngs is None or isinstance(rngs, nnx.Rngs | nnx.RngStream)):
        problems.append(f"rngs: expected nnx.Rngs or an nnx.RngStream, got {checks.summary(rngs)}")
    checks.raise_all(where, problems)
    stream = rngs = module.rngs if rngs is None else rngs
    if isinstance(rngs, nnx.Rngs) and ("dropout" in rngs or "default" in rngs):
        stream = rngs.dropout

    def dropout(rate_name: str, keep_name: str, kept: AnyArray | None) -> Dropout | None:
        rate = getattr(module, rate_name)
        if deterministic or rate == 0:
            if kept is not None:
                why = "deterministic is True" if deterministic else f"{rate_name} is 0"
                problems.append(f"{keep_name}: expected None, because {why}: nothing is dropped")
            return None
        if kept is not None:
            return Dropout(rate, keep=kept)
        if isinstance(stream, nnx.RngStream):
            return Dropout(rate, key=stream())
        problems.append(
            f"rngs: {rate_name} is {rate} and the module is in training mode; expected "
            f'rngs=nnx.Rngs(dropout=…) with a "dropout" stream here or in the constructor, or '
            f"{keep_name}=, deterministic=True or eval(); got {type(rngs).__name__}"
        )
        return None

    of_weights = dropout("dropout_rate", "keep", keep)
    of_output = dropout("out_dropout_rate", "out_keep", out_keep)
    if out_keep is not None and of_output is not None:
        problems += checks.broadcast_problems("out_keep", out_keep, shape_BTD, "(B, T, D)")
    checks.raise_all(where, problems)
    return of_weights, of_output


def cache_problems(
    module: Any,
    query: Any,
    cache: object,
    bias: object,
    others: Mapping[str, object],
    deterministic: bool | None,
    is_causal: bool,
) -> list[str]:
    """Say what is wrong with a call with a cache.

    bias: the call's, of a kind that caches know. others: arguments that must then be None.
    """
    problems = checks.is_causal_problems(is_causal)
    problems += [
        f"{name}: expected None with a cache" for name, x in others.items() if x is not None
    ]
    if not isinstance(bias, Alibi | DistanceBias | None):
        expected = "None, an Alibi or a DistanceBias with a cache"
        problems.append(f"bias: expected {expected}, got {checks.summary(bias)}")
    if not isinstance(cache, KVCache):
        problems.append(f"cache: expected a KVCache, got {checks.summary(cache)}")
    elif checks.is_array(query) and query.shape and query.shape[0] != cache.filled.shape[0]:
        rows = f"{query.shape[0]}, as in the query {checks.summary(query)}"
        problems.append(f"cache: expected a batch of {rows}, got one of {cache.filled.shape[0]}")
    own = f"a module that attends to its own inputs, of {module.embed_dim} features; it has"
    scaling = None if module.rotary is None else module.rotary.scaling
    deterministic, unclear = _deterministic(module, deterministic)
    drops = module.dropout_rate > 0 or module.out_dropout_rate > 0
    reasons = {
        f"expected {own} kdim = {module.kdim}": module.kdim != module.embed_dim,
        f"expected {own} vdim = {module.vdim}": module.vdim != module.embed_dim,
        "cannot be combined with DynamicNTK: its frequencies depend on the length of a call, so "
        "cached keys would no longer fit": isinstance(scaling, DynamicNTK),
        "expected a position_bias that is an Alibi or a RelativeBias, as it must know the "
        "positions of cached keys": not isinstance(
            module.position_bias, Alibi | RelativeBias | None
        ),
        "expected one bias by position, of the call or of the module": (
            bias is not None and module.position_bias is not None
        ),
        "expected implementation = None, because a cache has its own kernel; the module has "
        f"implementation = {module.implementation!r}": module.implementation is not None,
        "expected no dropout: eval() or deterministic=True": (
            drops and not (deterministic or unclear)
        ),
    }
    return problems + [f"cache: {reason}" for reason in checks.holding(reasons)] + unclear


def _deterministic(module: Any, given: Any) -> tuple[Any, list[str]]:
    """Return the call's deterministic, or else the module's; and what is wrong with it."""
    value = module.deterministic if given is None else given
    if isinstance(value, bool):
        return value, []
    got = checks.summary(value)
    return value, [f"deterministic: expected a static Python bool, got {got}"]
