"""Arguments of an attention module's constructor and calls: checks and defaults."""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jaxtyping import Int

from jax_attn.attention import Dropout, KVCache, checks, dispatch, integers, meshes
from jax_attn.attention.annotations import AnyArray
from jax_attn.attention.rotary import DynamicNTK, Rotary, position_problems, rotate

Positions = Int[AnyArray, "#B T"] | Int[AnyArray, " T"]


class Placement(NamedTuple):
    """Positions of queries and keys. alone: no key was given, so both have the same."""

    positions: Positions | None
    key_positions: Positions | None = None
    alone: bool = True


# --- arguments of the constructor -------------------------------------------------------------


def size_problems(
    embed_dim: Any, num_heads: Any, num_kv_heads: Any, head_dim: Any, kdim: Any, vdim: Any
) -> list[str]:
    """Say what is wrong with a constructor's sizes."""
    counts = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    optional = {"head_dim": head_dim, "kdim": kdim, "vdim": vdim}
    counts |= {name: size for name, size in optional.items() if size is not None}
    problems = checks.count_problems(**counts)
    fit = {name for name, size in counts.items() if checks.is_count(size)}
    if {"num_heads", "num_kv_heads"} <= fit and num_heads % num_kv_heads:
        problems.append(
            f"num_heads: expected a multiple of num_kv_heads={num_kv_heads}, got {num_heads}"
        )
    if {"num_heads", "embed_dim"} <= fit and head_dim is None and embed_dim % num_heads:
        problems.append(
            f"embed_dim: expected a multiple of num_heads={num_heads}, or a head_dim, "
            f"got {embed_dim}"
        )
    return problems


def option_problems(
    dtype: Any,
    param_dtype: Any,
    scale: Any,
    softcap: Any,
    precision: Any,
    implementation: Any,
    qk_norm: Any,
    rotary: Any,
    position_bias: Any,
    rngs: Any,
) -> list[str]:
    """Say what is wrong with a constructor's other options."""
    problems = []
    for name, wanted in (("dtype", dtype), ("param_dtype", param_dtype)):
        problems += [] if wanted is None else checks.dtype_problems(name, wanted)
    problems += checks.number_problems(scale, softcap)
    problems += checks.precision_problems(precision)
    problems += dispatch.implementation_problems(implementation)
    if not (qk_norm is None or callable(qk_norm)):
        got = checks.summary(qk_norm)
        problems.append(f"qk_norm: expected a norm, such as nnx.RMSNorm, got {got}")
    if not (rotary is None or isinstance(rotary, Rotary)):
        problems.append(f"rotary: expected a Rotary, got {checks.summary(rotary)}")
    if not (position_bias is None or callable(position_bias)):
        got = checks.summary(position_bias)
        problems.append(f"position_bias: expected a function of (T, S), such as Alibi, got {got}")
    if not isinstance(rngs, nnx.Rngs):
        problems.append(f"rngs: expected nnx.Rngs, got {type(rngs).__name__}")
    return problems


def flag_problems(**flags: object) -> list[str]:
    """List which of the named flags are not True or False."""
    return [
        f"{name}: expected True or False, got {checks.summary(flag)}"
        for name, flag in flags.items()
        if not isinstance(flag, bool)
    ]


INPUTS = ("q_proj", "k_proj", "v_proj")


def with_bias(use_bias: bool | Collection[str]) -> list[bool]:
    """Return, for each of INPUTS, whether it has a bias."""
    if isinstance(use_bias, bool):
        return [use_bias] * len(INPUTS)
    return [name in use_bias for name in INPUTS]


def bias_problems(use_bias: Any) -> list[str]:
    """Say why use_bias is neither a flag nor a collection of names among INPUTS."""
    if isinstance(use_bias, bool):
        return []
    is_several = isinstance(use_bias, Collection) and not isinstance(use_bias, str | Mapping)
    if is_several and all(isinstance(name, str) and name in INPUTS for name in use_bias):
        return []
    expected = f"True, False, or names among {', '.join(INPUTS)}"
    return [f"use_bias: expected {expected}, got {checks.summary(use_bias)}"]


AXES = ("embed", "heads", "kv_heads", "head_dim")
"""The axes of the parameters, as `sharding` names them."""


def names(sharding: Any, num_kv_heads: int) -> list[Any]:
    """Return the mesh name of each of AXES; None if it is not sharded."""
    given = dict(sharding or {})
    heads = given.get("heads")
    # If there are more parts of the heads than key/value heads, each part has all key/value heads.
    fits = num_kv_heads > 1 and num_kv_heads % _parts(heads) == 0
    given.setdefault("kv_heads", heads if fits else None)
    return [given.get(axis) for axis in AXES]


def sharding_problems(sharding: Any, **sizes: Collection[int]) -> list[str]:
    """Say what is wrong with a constructor's sharding; sizes: each axis's in the parameters."""
    if sharding is None:
        return []
    expected = f"sharding: expected a dict of {', '.join(AXES)}"
    if not isinstance(sharding, Mapping):
        return [f"{expected}, got {checks.summary(sharding)}"]
    problems = [f"{expected}, got {name!r}" for name in sharding if name not in AXES]
    mesh = jax.sharding.get_abstract_mesh()
    problems += meshes.problems(mesh)
    used: dict[str, list[str]] = {}
    for axis, wanted in sharding.items():
        where = f"sharding[{axis!r}]: expected"
        if not all(isinstance(name, str) for name in _each(wanted)):
            text = "the name of an axis of the mesh, a tuple of several, or None"
            problems.append(f"{where} {text}, got {wanted!r}")
            continue
        on_mesh, parts = _on_mesh(wanted), _parts(wanted)
        unknown = [name for name in on_mesh if not mesh.empty and name not in mesh.shape]
        if unknown:
            problems.append(f"{where} axes of the mesh {mesh.axis_names}, got {unknown}")
            continue
        for size in {n for n in sizes.get(axis, ()) if n % parts}:
            problems.append(
                f"{where} a number of parts that divides {axis} = {size}, got {parts} by {wanted!r}"
            )
        for name in on_mesh:
            used.setdefault(name, []).append(axis)
    for name, axes in used.items():
        # A parameter has query heads or key/value heads, never both.
        if len({"heads" if axis == "kv_heads" else axis for axis in axes}) > 1 or len(axes) > len(
            {*axes}
        ):
            problems.append(f"sharding: expected {name!r} once in a parameter, got it for {axes}")
    return problems


def _each(wanted: Any) -> tuple:
    """Return the names of an axis as a tuple: none, one, or several."""
    return wanted if isinstance(wanted, tuple) else () if wanted is None else (wanted,)


def _on_mesh(wanted: Any) -> list[str]:
    """Return the mesh axes of an axis: its names, or flax's logical axis rule for one name.

    Flax translates no name inside a tuple.
    """
    return [*_each(dict(get_logical_axis_rules() or ()).get(wanted, wanted))]


def _parts(wanted: Any) -> int:
    """Return into how many parts the current mesh shards an axis of this name; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape.get(axis, 1) for axis in _on_mesh(wanted))


# --- arguments of a call ------------------------------------------------------------------------


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
    module: Any, bias: AnyArray | None, q_BTD: jax.Array, k_BSD: jax.Array
) -> AnyArray | None:
    """Return the sum of the call's own bias and the module's position_bias."""
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
    deterministic, unclear = _deterministic(module, deterministic)
    if not (rngs is None or isinstance(rngs, nnx.Rngs | nnx.RngStream)):
        unclear.append(f"rngs: expected nnx.Rngs or an nnx.RngStream, got {checks.summary(rngs)}")
    rngs = module.rngs if rngs is None else rngs
    stream, where = rngs, type(module).__name__
    if isinstance(rngs, nnx.Rngs) and ("dropout" in rngs or "default" in rngs):
        stream = rngs.dropout
    checks.raise_all(where, unclear)
    problems: list[str] = []
    drops: list[Dropout | None] = []
    for rate_name, keep_name, kept in (
        ("dropout_rate", "keep", keep),
        ("out_dropout_rate", "out_keep", out_keep),
    ):
        rate = getattr(module, rate_name)
        drop = None
        if deterministic or rate == 0:
            if kept is not None:
                why = "deterministic is True" if deterministic else f"{rate_name} is 0"
                problems.append(f"{keep_name}: expected None, because {why}: nothing is dropped")
        elif kept is not None:
            drop = Dropout(rate, keep=kept)
        elif isinstance(stream, nnx.RngStream):
            drop = Dropout(rate, key=stream())
        else:
            problems.append(
                f"rngs: {rate_name} is {rate} and the module is in training mode; expected "
                f'rngs=nnx.Rngs(dropout=…) with a "dropout" stream here or in the constructor, or '
                f"{keep_name}=, deterministic=True or eval(); got {type(rngs).__name__}"
            )
        drops.append(drop)
    dropout, out_dropout = drops
    if out_keep is not None and out_dropout is not None:
        problems += checks.broadcast_problems("out_keep", out_keep, shape_BTD, "(B, T, D)")
    checks.raise_all(where, problems)
    return dropout, out_dropout


def cache_problems(
    module: Any,
    query: Any,
    cache: object,
    others: Mapping[str, object],
    deterministic: bool | None,
    is_causal: bool,
) -> list[str]:
    """Say what is wrong with a call with a cache. others: arguments that must then be None."""
    problems = checks.is_causal_problems(is_causal)
    problems += [
        f"{name}: expected None with a cache" for name, x in others.items() if x is not None
    ]
    if not isinstance(cache, KVCache):
        problems.append(f"cache: expected a KVCache, got {checks.summary(cache)}")
    elif checks.is_array(query) and query.shape and query.shape[0] != cache.filled.shape[0]:
        rows = f"{query.shape[0]}, as in the query {checks.summary(query)}"
        problems.append(f"cache: expected a batch of {rows}, got one of {cache.filled.shape[0]}")
    for name, size in (("kdim", module.kdim), ("vdim", module.vdim)):
        if size != module.embed_dim:
            problems.append(
                f"cache: expected a module that attends to its own inputs, of {module.embed_dim} "
                f"features; it has {name} = {size}"
            )
    if module.rotary is not None and isinstance(module.rotary.scaling, DynamicNTK):
        problems.append(
            "cache: cannot be combined with DynamicNTK: its frequencies depend on the length of a "
            "call, so cached keys would no longer fit"
        )
    if module.position_bias is not None:
        problems.append(
            "cache: expected a module without position_bias, which attention with a cache ignores"
        )
    if module.implementation is not None:
        problems.append(
            "cache: expected implementation = None, because a cache has its own kernel; the module "
            f"has implementation = {module.implementation!r}"
        )
    drops = module.dropout_rate > 0 or module.out_dropout_rate > 0
    deterministic, unclear = _deterministic(module, deterministic)
    if drops and not (deterministic or unclear):
        problems.append("cache: expected no dropout: eval() or deterministic=True")
    return problems + unclear


def _deterministic(module: Any, given: Any) -> tuple[Any, list[str]]:
    """Return the call's deterministic, or else the module's; and what is wrong with it."""
    value = module.deterministic if given is None else given
    if isinstance(value, bool):
        return value, []
    got = checks.summary(value)
    return value, [f"deterministic: expected a static Python bool, got {got}"]
