"""Arguments of an attention module's constructor: checks and defaults."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from flax import nnx
from flax.core.spmd import get_logical_axis_rules

from jax_attn.attention import checks, dispatch, meshes
from jax_attn.attention.rotary import Rotary

INPUTS = ("q_proj", "k_proj", "v_proj")
AXES = ("embed", "heads", "kv_heads", "head_dim")
"""The axes of the parameters, as `sharding` names them."""


def _is_flag(x: object) -> bool:
    return isinstance(x, bool)


# What an option must be, in words and as a predicate.
_OPTIONS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "qk_norm": ("a norm, such as nnx.RMSNorm", lambda x: x is None or callable(x)),
    "rotary": ("a Rotary", lambda x: x is None or isinstance(x, Rotary)),
    "position_bias": ("a function of (T, S), such as Alibi", lambda x: x is None or callable(x)),
    "add_bias_kv": ("True or False", _is_flag),
    "add_zero_attn": ("True or False", _is_flag),
    "sinks": ("True or False", _is_flag),
    "rngs": ("nnx.Rngs", lambda x: isinstance(x, nnx.Rngs)),
}


def problems(
    sizes: Mapping[str, Any], rates: Mapping[str, Any], use_bias: Any, sharding: Any, **options: Any
) -> list[str]:
    """List the problems of a constructor's arguments.

    sizes: embed_dim, num_heads, num_kv_heads, head_dim, kdim and vdim; the last three may be None.
    rates: those of dropout.
    """
    found = _size_problems(**sizes) + checks.rate_problems(**rates)
    for name in ("dtype", "param_dtype"):
        dtype = options[name]
        found += [] if dtype is None else checks.dtype_problems(name, dtype)
    found += checks.number_problems(options["scale"], options["softcap"])
    found += checks.precision_problems(options["precision"])
    found += dispatch.implementation_problems(options["implementation"])
    found += [
        f"{name}: expected {expected}, got {checks.summary(options[name])}"
        for name, (expected, is_fit) in _OPTIONS.items()
        if not is_fit(options[name])
    ]
    found += _bias_problems(use_bias)
    if found:
        return found
    D, N, K, H, kdim, vdim = sizes.values()
    H = D // N if H is None else H
    found += [] if options["rotary"] is None else options["rotary"].problems(H)
    embed = {D, kdim or D, vdim or D}
    return found + _sharding_problems(sharding, embed=embed, heads={N}, kv_heads={K}, head_dim={H})


def _size_problems(
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


def _bias_problems(use_bias: Any) -> list[str]:
    """Say why use_bias is neither a flag nor a collection of names among INPUTS."""
    if isinstance(use_bias, bool):
        return []
    is_several = isinstance(use_bias, Collection) and not isinstance(use_bias, str | Mapping)
    if is_several and all(isinstance(name, str) and name in INPUTS for name in use_bias):
        return []
    expected = f"True, False, or names among {', '.join(INPUTS)}"
    return [f"use_bias: expected {expected}, got {checks.summary(use_bias)}"]


def _sharding_problems(sharding: Any, **sizes: Collection[int]) -> list[str]:
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


def with_bias(use_bias: bool | Collection[str]) -> list[bool]:
    """Return, for each of INPUTS, whether it has a bias."""
    if isinstance(use_bias, bool):
        return [use_bias] * len(INPUTS)
    return [name in use_bias for name in INPUTS]


def names(sharding: Any, num_kv_heads: int) -> list[Any]:
    """Return the mesh name of each of AXES; None if it is not sharded."""
    given = dict(sharding or {})
    heads = given.get("heads")
    # If there are more parts of the heads than key/value heads, each part has all key/value heads.
    fits = num_kv_heads > 1 and num_kv_heads % _parts(heads) == 0
    given.setdefault("kv_heads", heads if fits else None)
    return [given.get(axis) for axis in AXES]
