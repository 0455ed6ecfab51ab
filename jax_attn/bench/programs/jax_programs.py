"""Implementations of a workload in JAX. Builders: (workload, arrays) -> `TimedProgram`.

Each call is a pure function of the inputs and a flat tuple of weights, so that no implementation
pays for traversing a module and no weight is folded into the program as a constant.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_attn import attention
from jax_attn import nn as ported
from jax_attn.attention import KVCache, attend_with_cache
from jax_attn.bench.arrays import weights
from jax_attn.bench.programs.program import Arrays, TimedProgram, UnsuitedError, flax_shapes
from jax_attn.bench.workload import Workload
from jax_attn.transfer import FLAX_NAMES, LAYOUTS, Layout, flatten, load

_GQA = LAYOUTS["gqa"]
XLA = "XLA"  # the kernel of implementations that leave the choice to the compiler


def ours_core(
    workload: Workload, arrays: Arrays, implementation: str | None = None
) -> TimedProgram:
    kernel = _chosen(workload, implementation)

    def call(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention.dot_product_attention(
            query, key, value, is_causal=workload.is_causal, implementation=implementation
        )

    return TimedProgram(call, {}, kernel=kernel, writes_scores=kernel == "dense")


def ours_layer(
    workload: Workload, arrays: Arrays, implementation: str | None = None
) -> TimedProgram:
    kernel = _chosen(workload, implementation)
    module = _ours(workload, implementation=implementation)
    options = {"kernel": kernel, "writes_scores": kernel == "dense"}
    return _from_nnx(module, _GQA, arrays, _causal(workload), **options)


def _causal(w: Workload) -> Callable[..., jax.Array]:
    return lambda module, x: module(x, is_causal=w.is_causal)


def _chosen(w: Workload, implementation: str | None) -> str:
    """Return the kernel that would run. Raises UnsuitedError with every reason if none would."""
    query = jax.ShapeDtypeStruct((w.B, w.T, w.N, w.H), w.dtype)
    key = jax.ShapeDtypeStruct((w.B, w.S, w.K, w.H), w.dtype)
    explanation = attention.explain_kernel(
        query, key, key, is_causal=w.is_causal, implementation=implementation
    )
    if explanation.chosen is None:
        raise UnsuitedError("; ".join(r for why in explanation.refusals.values() for r in why))
    return explanation.chosen


def _zeros(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Initialize to zeros, drawing nothing, for parameters that are overwritten later."""
    return jnp.asarray(np.zeros(shape, dtype))


def _ours(w: Workload, **options: Any) -> ported.GroupedQueryAttention:
    options |= {"kernel_init": _zeros, "bias_init": _zeros, "rngs": nnx.Rngs(0)}
    options |= {"head_dim": w.H, "param_dtype": w.dtype}
    module = ported.GroupedQueryAttention(w.D, w.N, w.K, **options)
    module.eval()
    return module


def jax_nn_core(workload: Workload, arrays: Arrays) -> TimedProgram:
    call = partial(jax.nn.dot_product_attention, is_causal=workload.is_causal)
    return TimedProgram(call, {}, kernel=XLA)


def jax_nn_layer(workload: Workload, arrays: Arrays) -> TimedProgram:
    """Build this package's projections around jax.nn's attention."""
    module = _ours(workload)

    def call(module: ported.GroupedQueryAttention, x: jax.Array) -> jax.Array:
        projected = module.q_proj(x), module.k_proj(x), module.v_proj(x)
        attended = jax.nn.dot_product_attention(*projected, is_causal=workload.is_causal)
        return module.out_proj(attended)

    return _from_nnx(module, _GQA, arrays, call, kernel=XLA)


def flax_core(workload: Workload, arrays: Arrays) -> TimedProgram:
    call = partial(nnx.dot_product_attention, is_causal=workload.is_causal)
    return TimedProgram(call, {}, kernel=XLA)


def flax_layer(workload: Workload, arrays: Arrays) -> TimedProgram:
    w = workload
    options: dict[str, Any] = {"qkv_features": w.N * w.H, "num_kv_heads": w.K, "decode": False}
    options |= {"param_dtype": jnp.dtype(w.dtype), "kernel_init": _zeros, "deterministic": True}
    module = nnx.MultiHeadAttention(w.N, w.D, **options, rngs=nnx.Rngs(0))
    return _from_nnx(module, _GQA.renamed(FLAX_NAMES), arrays, _causal(w), kernel=XLA)


def _from_nnx(
    module: nnx.Module,
    layout: Layout,
    arrays: Arrays,
    call: Callable[..., jax.Array],
    **options: Any,
) -> TimedProgram:
    """Split the module once, so that a call takes its parameters as a flat tuple of leaves.

    options: fields of the TimedProgram.
    """
    load(module, weights(arrays), layout)
    graph, params, *rest = nnx.split(module, nnx.Param, ...)
    leaves, tree = jax.tree.flatten(params)
    paths = {id(leaf): path for path, leaf in flatten(params).items()}

    def run(x: jax.Array, *leaves: jax.Array) -> jax.Array:
        return call(nnx.merge(graph, jax.tree.unflatten(tree, leaves), *rest), x)

    return TimedProgram(run, {paths[id(leaf)]: leaf for leaf in leaves}, layout.to_torch, **options)


def equinox_layer(workload: Workload, arrays: Arrays) -> TimedProgram:
    import equinox as eqx

    w = workload
    if w.K != w.N:
        raise UnsuitedError("equinox.nn.MultiheadAttention has as many key/value heads as query's")
    options: dict[str, Any] = {"qk_size": w.H, "vo_size": w.H, "dtype": jnp.dtype(w.dtype)}
    options |= {f"use_{part}_bias": True for part in ("query", "key", "value", "output")}
    module = eqx.nn.MultiheadAttention(w.N, w.D, **options, key=jax.random.key(0))
    params, static = eqx.partition(module, eqx.is_inexact_array)
    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    spelled = {"query": "q", "key": "k", "value": "v", "output": "out"}

    def canonical(path: tuple[Any, ...]) -> str:
        part, kind = (step.name for step in path)
        return f"{spelled[part.removesuffix('_proj')]}_proj.{kind}"

    named = {canonical(path): arrays[canonical(path)] for path, _ in paths}

    def run(x: jax.Array, *leaves: jax.Array) -> jax.Array:
        attend = eqx.combine(jax.tree.unflatten(tree, leaves), static)
        visible = jnp.tril(jnp.ones((w.T, w.S), bool)) if w.is_causal else None
        return jax.vmap(lambda x: attend(x, x, x, visible))(x)

    return TimedProgram(run, named, kernel=XLA)


def keras_core(workload: Workload, arrays: Arrays) -> TimedProgram:
    import keras

    call = partial(keras.ops.dot_product_attention, is_causal=workload.is_causal)
    return TimedProgram(call, {}, kernel=XLA)


def keras_layer(workload: Workload, arrays: Arrays) -> TimedProgram:
    import keras

    w, layers = workload, keras.layers
    if w.K == w.N:
        layer = layers.MultiHeadAttention(w.N, w.H, dtype=w.dtype)
    else:
        layer = layers.GroupQueryAttention(w.H, w.N, w.K, dtype=w.dtype)
    layer.build((w.B, w.T, w.D), (w.B, w.S, w.D))
    names = FLAX_NAMES | {"out_proj": "attention_output"}
    layout = _GQA.renamed(names)
    paths = [".".join(v.path.split("/")[-2:]) for v in layer.trainable_variables]
    shapes = {
        f"{names[part]}.{kind}": shape
        for (part, kind), shape in ((p.split("."), s) for p, s in flax_shapes(w).items())
    }
    flax_weights = layout.to_flax(weights(arrays), shapes)

    def run(x: jax.Array, *leaves: jax.Array) -> jax.Array:
        options = {"use_causal_mask": w.is_causal, "training": False}
        return layer.stateless_call(list(leaves), [], x, x, **options)[0]

    return TimedProgram(
        run, {path: flax_weights[path] for path in paths}, layout.to_torch, kernel=XLA
    )


# --- with a cache ----------------------------------------------------------------------------
#
# Each call is a pure function of the cache, which the engine donates, and of the query, key and
# value of the new tokens. It returns the cache with its old fill count, so that the next call
# repeats the same step and overwrites the tokens that this one wrote.


def ours_cached(workload: Workload, arrays: Arrays) -> TimedProgram:
    w, past = workload, (arrays["past_key"], arrays["past_value"])
    cache = KVCache.empty(w.B, w.room, num_kv_heads=w.K, head_dim=w.H, dtype=w.dtype)
    if w.filled:
        cache = jax.jit(_read, donate_argnums=0)(cache, *past)

    def call(
        cache: KVCache, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        output, grown = attend_with_cache(query, key, value, cache)
        return output, replace(grown, filled=cache.filled)

    return TimedProgram(
        call, {}, kernel="attend", writes_scores=False, cache=cache, cache_bytes=cache.nbytes
    )


def _read(cache: KVCache, key: jax.Array, value: jax.Array) -> KVCache:
    """Return the cache with these tokens added; the compiler drops their unused output."""
    return attend_with_cache(key, key, value, cache)[1]


def jax_nn_cached(workload: Workload, arrays: Arrays) -> TimedProgram:
    """Write new tokens into static arrays after the filled part, with jax.nn's lengths."""
    w = workload
    cache = {"filled": jnp.int32(w.filled)}
    for name in ("key", "value"):  # separate zeros, because a buffer can be donated only once
        room = jnp.zeros((w.B, w.room, w.K, w.H), w.dtype)
        cache[name] = room.at[:, : w.filled].set(arrays[f"past_{name}"])

    def call(
        cache: dict[str, jax.Array], query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        filled = cache["filled"]
        keys = jax.lax.dynamic_update_slice_in_dim(cache["key"], key, filled, 1)
        values = jax.lax.dynamic_update_slice_in_dim(cache["value"], value, filled, 1)
        lengths_B = jnp.full(w.B, filled + w.T)
        mask = None
        if w.T > 1:  # jax.nn aligns its causal mask to the top left
            mask = jnp.arange(w.room) <= filled + jnp.arange(w.T)[:, None]
            mask = jnp.broadcast_to(mask, (w.B, w.N, w.T, w.room))
        output = jax.nn.dot_product_attention(
            query, keys, values, mask=mask, key_value_seq_lengths=lengths_B
        )
        return output, {"key": keys, "value": values, "filled": filled}

    nbytes = cache["key"].nbytes + cache["value"].nbytes
    return TimedProgram(call, {}, kernel=XLA, cache=cache, cache_bytes=nbytes)
