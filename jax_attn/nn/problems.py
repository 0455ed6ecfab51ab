"""Checks of a module's arguments; each lists every problem, to be raised at once."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from jax_attn.attention import KVCache, checks, dispatch
from jax_attn.attention.rotary import DynamicNTK, Rotary


def size_problems(
    embed_dim: Any, num_heads: Any, num_kv_heads: Any, head_dim: Any, kdim: Any, vdim: Any
) -> list[str]:
    """What is wrong with a constructor's sizes."""
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
    *,
    dtype: Any,
    param_dtype: Any,
    scale: Any,
    softcap: Any,
    implementation: Any,
    qk_norm: Any,
    rotary: Any,
    position_bias: Any,
    rngs: Any,
    **rates: Any,
) -> list[str]:
    """What is wrong with a constructor's other options. rates: the dropouts', by name."""
    problems = [
        f"{name}: expected a number in [0, 1], got {rate!r}"
        for name, rate in rates.items()
        if not checks.is_rate(rate)
    ]
    for name, wanted in (("dtype", dtype), ("param_dtype", param_dtype)):
        problems += [] if wanted is None else checks.dtype_problems(name, wanted)
    problems += checks.number_problems(scale, softcap)
    problems += dispatch.implementation_problems(implementation)
    if not (qk_norm is None or callable(qk_norm)):
        got = checks.summary(qk_norm)
        problems.append(f"qk_norm: expected what makes a norm, as nnx.RMSNorm does, got {got}")
    if not (rotary is None or isinstance(rotary, Rotary)):
        problems.append(f"rotary: expected a Rotary, got {checks.summary(rotary)}")
    if not (position_bias is None or callable(position_bias)):
        got = checks.summary(position_bias)
        problems.append(f"position_bias: expected what gives a bias, as Alibi does, got {got}")
    if not isinstance(rngs, nnx.Rngs):
        problems.append(f"rngs: expected nnx.Rngs, got {type(rngs).__name__}")
    return problems


def cache_problems(
    module: Any, cache: object, others: Mapping[str, object], deterministic: bool | None
) -> list[str]:
    """What is wrong with a call with a cache. others: arguments that must be None beside it."""
    problems = [
        f"{name}: expected None beside a cache" for name, x in others.items() if x is not None
    ]
    if not isinstance(cache, KVCache):
        problems.append(f"cache: expected a KVCache, got {checks.summary(cache)}")
    for name, size in (("kdim", module.kdim), ("vdim", module.vdim)):
        if size != module.embed_dim:
            problems.append(
                f"cache: expected a module that attends to its own inputs, of {module.embed_dim} "
                f"features; it has {name} = {size}"
            )
    if module.rotary is not None and isinstance(module.rotary.scaling, DynamicNTK):
        problems.append(
            "cache: cannot be combined with DynamicNTK: its frequencies depend on the length of a "
            "call, so that keys turned before would no longer fit"
        )
    if module.position_bias is not None:
        problems.append(
            "cache: expected a module without position_bias, as a cache's kernel adds none"
        )
    if module.implementation is not None:
        problems.append(
            "cache: expected a module that insists on no kernel, as a cache has its own; it has "
            f"implementation = {module.implementation!r}"
        )
    drops = module.dropout_rate > 0 or module.out_dropout_rate > 0
    deterministic = module.deterministic if deterministic is None else deterministic
    if not isinstance(deterministic, bool):
        got = checks.summary(deterministic)
        problems.append(f"deterministic: expected a static Python bool, got {got}")
    elif drops and not deterministic:
        problems.append("cache: expected no dropout: eval() or deterministic=True")
    return problems
