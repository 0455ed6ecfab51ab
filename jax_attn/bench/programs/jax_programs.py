"""JAX's ways to compute a workload. Builders: (workload, arrays) -> `Program`.

Each call is a pure function of the inputs and a flat tuple of weights, so that no implementation
pays for traversing a module and no weight is folded into the program as a constant.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_attn import attention
from jax_attn import nn as ported
from jax_attn.bench.arrays import weights
from jax_attn.bench.programs.program import Arrays, Program, UnsuitedError, flax_shapes
from jax_attn.bench.workload import Workload
from jax_attn.transfer import FLAX_NAMES, LAYOUTS, Layout, flatten, load

_GQA = LAYOUTS["gqa"]
XLA = "XLA"  # the kernel of implementations that leave the choice to the compiler


def ours_core(workload: Workload, arrays: Arrays, implementation: str | None = None) -> Program:
    kernel = _chosen(workload, implementation)

    def call(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention.dot_product_attention(
            query, key, value, is_causal=workload.is_causal, implementation=implementation
        )

    return Program(call, {}, kernel=kernel, writes_scores=kernel == "dense")


def ours_layer(workload: Workload, arrays: Arrays, implementation: str | None = None) -> Program:
    kernel = _chosen(workload, implementation)
    module = _ours(workload, implementation=implementation)
    call = partial(_call, is_causal=workload.is_causal)
    return _from_nnx(module, _GQA, arrays, call, kernel=kernel, writes_scores=kernel == "dense")


def _call(module: Callable[..., jax.Array], x: jax.Array, **options: Any) -> jax.Array:
    return module(x, **options)


def _chosen(w: Workload, implementation: str | None) -> str:
    """The kernel that would run. Raises UnsuitedError with every reason why none would."""
    query = jax.ShapeDtypeStruct((w.B, w.T, w.N, w.H), w.dtype)
    key = jax.ShapeDtypeStruct((w.B, w.S, w.K, w.H), w.dtype)
    explanation = attention.explain(
        query, key, key, is_causal=w.is_causal, implementation=implementation
    )
    if explanation.chosen is None:
        raise UnsuitedError("; ".join(r for why in explanation.refusals.values() for r in why))
    return explanation.chosen


def _zeros(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An initializer that draws nothing, for parameters that are overwritten."""
    return jnp.asarray(np.zeros(shape, dtype))


def _ours(w: Workload, **options: Any) -> ported.GroupedQueryAttention:
    options |= {"kernel_init": _zeros, "bias_init": _zeros, "rngs": nnx.Rngs(0)}
    options |= {"head_dim": w.H, "param_dtype": w.dtype}
    module = ported.GroupedQueryAttention(w.D, w.N, w.K, **options)
    module.eval()
    return module


def jax_nn_core(workload: Workload, arrays: Arrays) -> Program:
    call = partial(jax.nn.dot_product_attention, is_causal=workload.is_causal)
    return Program(call, {}, kernel=XLA)


def jax_nn_layer(workload: Workload, arrays: Arrays) -> Program:
    """This package's projections around jax.nn's attention."""
    module = _ours(workload)

    def call(module: ported.GroupedQueryAttention, x: jax.Array) -> jax.Array:
        projected = module.q_proj(x), module.k_proj(x), module.v_proj(x)
        attended = jax.nn.dot_product_attention(*projected, is_causal=workload.is_causal)
        return module.out_proj(attended)

    return _from_nnx(module, _GQA, arrays, call, kernel=XLA)


def flax_core(workload: Workload, arrays: Arrays) -> Program:
    call = partial(nnx.dot_product_attention, is_causal=workload.is_causal)
    return Program(call, {}, kernel=XLA)


def flax_layer(workload: Workload, arrays: Arrays) -> Program:
    w = workload
    module = nnx.MultiHeadAttention(
        w.N,
        w.D,
        qkv_features=w.N * w.H,
        num_kv_heads=w.K,
        param_dtype=jnp.dtype(w.dtype),
        kernel_init=_zeros,
        decode=False,
        deterministic=True,
        rngs=nnx.Rngs(0),
    )
    call = partial(_call, is_causal=w.is_causal)
    return _from_nnx(module, _GQA.renamed(FLAX_NAMES), arrays, call, kernel=XLA)


def _from_nnx(
    module: nnx.Module,
    layout: Layout,
    arrays: Arrays,
    call: Callable[..., jax.Array],
    **options: Any,
) -> Program:
    """The module split once, its parameters a flat tuple of leaves; options: of the Program."""
    load(module, weights(arrays), layout)
    graph, params, *rest = nnx.split(module, nnx.Param, ...)
    leaves, tree = jax.tree.flatten(params)
    names = _names(params, leaves)

    def run(x: jax.Array, *leaves: jax.Array) -> jax.Array:
        return call(nnx.merge(graph, jax.tree.unflatten(tree, leaves), *rest), x)

    return Program(run, dict(zip(names, leaves, strict=True)), layout.to_torch, **options)


def _names(params: nnx.State, leaves: list[Any]) -> list[str]:
    """The dotted path of each leaf."""
    by_leaf = {id(leaf): path for path, leaf in flatten(params).items()}
    return [by_leaf[id(leaf)] for leaf in leaves]


def equinox_layer(workload: Workload, arrays: Arrays) -> Program:
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

    return Program(run, named, kernel=XLA)


def keras_core(workload: Workload, arrays: Arrays) -> Program:
    import keras

    call = partial(keras.ops.dot_product_attention, is_causal=workload.is_causal)
    return Program(call, {}, kernel=XLA)


def keras_layer(workload: Workload, arrays: Arrays) -> Program:
    import keras

    w = workload
    grouped = keras.layers.GroupQueryAttention
    layer = (
        keras.layers.MultiHeadAttention(w.N, w.H, dtype=w.dtype)
        if w.K == w.N
        else grouped(w.H, w.N, w.K, dtype=w.dtype)
    )
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

    return Program(run, {path: flax_weights[path] for path in paths}, layout.to_torch, kernel=XLA)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    return a @ b
