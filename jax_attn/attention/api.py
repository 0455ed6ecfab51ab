"""Attention as functions of arrays.

Axes: B batch, T query length, S key/value length, N query heads, K key/value heads,
G = N // K, H head_dim, Hv that of the values. Query head n reads key/value head n // G.
E counts the extra keys that have a column of weights: bias_k and add_zero_attn, 0 to 2.
"""

import dataclasses

from jax.lax import PrecisionLike
from jaxtyping import Array, Bool, Float

from jax_attn.attention import checks, dispatch
from jax_attn.attention.annotations import AbstractArray, AnyArray
from jax_attn.attention.broadcasting import broadcasting
from jax_attn.attention.call import ExtraKeys, checked_call
from jax_attn.attention.dispatch import Implementation, KernelExplanation
from jax_attn.attention.dropout import Dropout
from jax_attn.attention.kernels import cached, dense
from jax_attn.attention.kernels.mesh import explicit
from jax_attn.attention.kernels.mesh.shards import WEIGHTS
from jax_attn.attention.kv_cache import KVCache
from jax_attn.attention.mask import MaskLike
from jax_attn.attention.position_bias import (
    Alibi,
    DistanceBias,
    alibi_problems,
    distance_problems,
)


@broadcasting
def dot_product_attention(
    query: Float[AnyArray, "B T N H"],
    key: Float[AnyArray, "B S K H"],
    value: Float[AnyArray, "B S K Hv"],
    mask: MaskLike | None = None,
    *,
    is_causal: bool = False,
    bias: Float[AnyArray, "*#BNTS"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: Dropout | None = None,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
    bias_k: Float[AnyArray, "K H"] | None = None,
    bias_v: Float[AnyArray, "K Hv"] | None = None,
    add_zero_attn: bool = False,
    sinks: Float[AnyArray, " N"] | None = None,
) -> Float[Array, "B T N Hv"]:
    """Compute softmax(scale · query · keyᵀ) · value for each query head.

    The order is scale · QKᵀ → softcap → bias → mask → softmax → dropout → V. A query that may
    attend to nothing, because of the mask or a bias of −inf, gives 0 and has no gradient; if there
    are extra keys, it attends to those. Hidden keys and values must still be finite: 0 · NaN is
    NaN.

    Args:
      query: (B, T, N, H) in float16, bfloat16, float32 or float64.
      key: (B, S, K, H), in the query's dtype; N is a multiple of K.
      value: (B, S, K, Hv), in the query's dtype.
      mask: a Mask, or a boolean array that broadcasts to (B, N, T, S), rank 2 or 4; True =
        attend.
      is_causal: a static bool; True means ``mask & Mask.causal()``: key j ≤ query i.
      bias: floats added to the scores; broadcasts to (B, N, T, S) as in NumPy, so rank 3 is
        (N, T, S).
      scale: a plain number; 1/√H unless given.
      softcap: a plain number c > 0: scores become c · tanh(scores / c).
      dropout: a Dropout over (B, N, T, S + E).
      precision: of both products, as in ``jax.lax.dot_general``.
      implementation: the required kernel, by name or as a ``dispatch.Kernel`` (for example a known
        kernel with other tile sizes); None chooses one. "dense" writes out every score. "blocked"
        holds no T×S array, forward or backward; its forward mode (jvp, jacfwd) and its second
        derivatives (hessian) are computed by dense and take dense's memory.
      bias_k, bias_v: (K, H) and (K, Hv), in the query's dtype: one more key, such as a learned one,
        and its value, after the S keys. Every query sees it: mask and bias cover only the S keys.
      add_zero_attn: a static bool; True adds a key and a value of 0 after those, which every query
        sees too.
      sinks: (N,) floats: for each query head a score that belongs to no key. It is not scaled,
        takes its share of the softmax, and has no value, no column of weights and no dropout.

    Returns:
      (B, T, N, Hv) in the query's dtype. The softmax is in float32, or float64 for float64.

    Raises:
      ArgumentError: lists every problem with the arguments, or every reason why the requested
        implementation cannot serve them. It is both a ValueError and a TypeError.

    Vaswani et al., 2017; grouped queries: Ainslie et al., 2023; softcap: Gemma Team, 2024; the
    empty row: ONNX Attention, opset 24; bias_k, bias_v, add_zero_attn: torch.nn.MultiheadAttention;
    sinks: OpenAI, gpt-oss, 2025.
    """
    problems = dispatch.implementation_problems(implementation)
    options = (is_causal, bias, scale, softcap, dropout, precision)
    extra = ExtraKeys(bias_k, bias_v, add_zero_attn, sinks)
    where = "dot_product_attention"
    call = checked_call(where, query, key, value, mask, *options, extra, other_problems=problems)
    return dispatch.run(call, implementation)


@broadcasting
def attention_weights(
    query: Float[AnyArray, "B T N H"],
    key: Float[AnyArray, "B S K H"],
    mask: MaskLike | None = None,
    *,
    is_causal: bool = False,
    bias: Float[AnyArray, "*#BNTS"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    precision: PrecisionLike = None,
    bias_k: Float[AnyArray, "K H"] | None = None,
    add_zero_attn: bool = False,
    sinks: Float[AnyArray, " N"] | None = None,
) -> Float[Array, "B N T S+E"]:
    """Compute the softmax by which dot_product_attention multiplies the values, before dropout.

    Arguments and errors are those of dot_product_attention. This is a separate function so that
    asking for the weights never changes how the output is computed.

    Returns:
      (B, N, T, S + E) in the query's dtype: after the S keys' columns come that of bias_k and that
      of add_zero_attn. A row that may attend to nothing is 0.
    """
    options = (is_causal, bias, scale, softcap, None, precision)
    extra = ExtraKeys(bias_k, None, add_zero_attn, sinks)
    where = "attention_weights"
    call = checked_call(where, query, key, None, mask, *options, extra, needs_value=False)
    call = call.on_device()
    if explicit.is_cut(call):
        return explicit.on_each_device(dense.weights, WEIGHTS, call)
    return dense.weights(call)


@broadcasting
def explain_kernel(
    query: Float[AbstractArray, "B T N H"],
    key: Float[AbstractArray, "B S K H"],
    value: Float[AbstractArray, "B S K Hv"],
    mask: MaskLike | Bool[AbstractArray, "*#BNTS"] | None = None,
    *,
    is_causal: bool = False,
    bias: Float[AbstractArray, "*#BNTS"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: Dropout | None = None,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
    bias_k: Float[AbstractArray, "K H"] | None = None,
    bias_v: Float[AbstractArray, "K Hv"] | None = None,
    add_zero_attn: bool = False,
    sinks: Float[AbstractArray, " N"] | None = None,
) -> KernelExplanation:
    """Explain which kernel dot_product_attention would run for these arguments, and why no other.

    Nothing is run: arrays may be `jax.ShapeDtypeStruct`. Invalid arguments raise the same
    ArgumentError as in dot_product_attention; if the requested kernel cannot serve the call, the
    explanation says so and nothing is raised.
    """
    problems = dispatch.implementation_problems(implementation)
    options = (is_causal, bias, scale, softcap, dropout, precision)
    extra = ExtraKeys(bias_k, bias_v, add_zero_attn, sinks)
    where = "explain_kernel"
    call = checked_call(where, query, key, value, mask, *options, extra, other_problems=problems)
    return dispatch.explain(call, implementation)


explain = explain_kernel  # its name before `parity.explain`, which finds bugs


@broadcasting
def attend_with_cache(
    query: Float[AnyArray, "B T N H"],
    key: Float[AnyArray, "B T K H"],
    value: Float[AnyArray, "B T K Hv"],
    cache: KVCache,
    mask: MaskLike | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    precision: PrecisionLike = None,
    bias_k: Float[AnyArray, "K H"] | None = None,
    bias_v: Float[AnyArray, "K Hv"] | None = None,
    add_zero_attn: bool = False,
    sinks: Float[AnyArray, " N"] | None = None,
    alibi: Alibi | None = None,
    distances: DistanceBias | None = None,
) -> tuple[Float[Array, "B T N Hv"], KVCache]:
    """Compute causal attention of the next tokens to all tokens so far, and extend the cache.

    Args:
      query, key, value: of the next tokens.
      cache: keys and values of the earlier tokens.
      mask: for the next tokens only. Its lengths say how many of a row's T tokens are real; the
        outputs of the others are meaningless, and they are not cached. Its band says how far back a
        token sees (``Mask.window(left, 0)``). Other conditions are refused.
      scale, softcap, precision, bias_k, bias_v, add_zero_attn, sinks: as in
        ``dot_product_attention``; extra keys are seen in every call and never cached.
      alibi, distances: one of them adds a bias by the positions of all tokens so far; not beside
        extra keys.

    Returns:
      (B, T, N, Hv) in the query's dtype, and the cache with the new tokens. If a row would hold
      more tokens than fit, ArgumentError is raised, or, under tracing, all of that row is NaN.

    Raises:
      ArgumentError: lists every problem with the arguments.
    """
    options = (True, None, scale, softcap, None, precision)  # causal, without bias and dropout
    extra = ExtraKeys(bias_k, bias_v, add_zero_attn, sinks)
    where = "attention with a cache"
    call = checked_call(where, query, key, value, mask, *options, extra)
    problems = alibi_problems(alibi, call.N) + distance_problems(distances, call.N)
    if alibi is not None and distances is not None:
        problems.append("distances: expected None beside alibi")
    if not problems:
        by_keys = distances if alibi is None else alibi.slopes
        call = dataclasses.replace(call, position_bias=by_keys)
    checks.raise_all(where, problems + cached.refusals(call, cache))
    return cached.attention(call.on_device(), cache)
