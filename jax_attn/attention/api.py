"""Attention as a function: what it computes, for whom, and by which kernel.

Axes: B batch, T query length, S key/value length, N query heads, K key/value heads,
G = N // K, H head_dim, Hv that of the values. Query head n reads key/value head n // G.
"""

import jax

from jax_attn.attention import checks, dispatch
from jax_attn.attention.call import checked_call
from jax_attn.attention.dispatch import Explanation
from jax_attn.attention.kernels import dense


def dot_product_attention(
    query,
    key,
    value,
    mask=None,
    *,
    is_causal=False,
    bias=None,
    scale=None,
    softcap=None,
    dropout=None,
    precision=None,
    implementation=None,
) -> jax.Array:
    """softmax(scale · query · keyᵀ) · value, for each query head.

    The order is scale · QKᵀ → softcap → bias → mask → softmax → dropout → V. A query that may
    attend to nothing, by the mask or by a bias of −inf, gives 0 and sends no gradient. What the
    mask hides must still be finite: 0 · NaN is NaN.

    Args:
      query: (B, T, N, H) in float16, bfloat16, float32 or float64.
      key: (B, S, K, H), in the query's dtype; N is a multiple of K.
      value: (B, S, K, Hv), likewise.
      mask: a Mask, or a boolean array that broadcasts to (B, N, T, S), rank 2 or 4; True =
        attend.
      is_causal: a static bool; True is ``mask & Mask.causal()``: key j ≤ query i.
      bias: floats added to the scores; broadcasts to (B, N, T, S) as in NumPy, so that rank 3
        is (N, T, S).
      scale: a plain number; 1/√H unless given.
      softcap: a plain number c > 0: scores become c · tanh(scores / c).
      dropout: a Dropout over (B, N, T, S).
      precision: of both products, as in ``jax.lax.dot_general``.
      implementation: the kernel to insist on, by its name or as a ``dispatch.Kernel`` (such as
        one of known name that runs with other tiles); None chooses. "dense" writes every score
        out. "blocked" holds no T×S array, forward or backward; it has no forward mode (jvp,
        hessian: there insist on "dense"), and its second derivatives are dense's, with its memory.

    Returns:
      (B, T, N, Hv) in the query's dtype. The softmax is in float32, or float64 for float64.

    Raises:
      ArgumentError (a ValueError and a TypeError): everything that is wrong with the arguments,
      or every reason why the implementation insisted on cannot serve them.

    Vaswani et al., 2017; grouped queries: Ainslie et al., 2023; softcap: Gemma Team, 2024; the
    empty row: ONNX Attention, opset 24.
    """
    call = _call(
        "dot_product_attention",
        query,
        key,
        value,
        mask,
        implementation=implementation,
        is_causal=is_causal,
        bias=bias,
        scale=scale,
        softcap=softcap,
        dropout=dropout,
        precision=precision,
    )
    return dispatch.run(call, implementation)


def attention_weights(
    query,
    key,
    mask=None,
    *,
    is_causal=False,
    bias=None,
    scale=None,
    softcap=None,
    precision=None,
) -> jax.Array:
    """The softmax that dot_product_attention multiplies the values by, before dropout.

    Arguments and errors as there. A function of its own, so that looking at the weights never
    changes how the output is computed.

    Returns:
      (B, N, T, S) in the query's dtype. A row that may attend to nothing is 0.
    """
    call = _call(
        "attention_weights",
        query,
        key,
        None,
        mask,
        is_causal=is_causal,
        bias=bias,
        scale=scale,
        softcap=softcap,
        dropout=None,
        precision=precision,
        needs_value=False,
    )
    return dense.weights(call.on_device())


def explain(
    query,
    key,
    value,
    mask=None,
    *,
    is_causal=False,
    bias=None,
    scale=None,
    softcap=None,
    dropout=None,
    precision=None,
    implementation=None,
) -> Explanation:
    """Which kernel dot_product_attention would run for these arguments, and why not the others.

    Runs nothing: arrays may be ``jax.ShapeDtypeStruct``. Raises where dot_product_attention
    would raise for its arguments; a kernel that is insisted on and cannot serve them is told by
    the explanation.
    """
    call = _call(
        "explain",
        query,
        key,
        value,
        mask,
        implementation=implementation,
        is_causal=is_causal,
        bias=bias,
        scale=scale,
        softcap=softcap,
        dropout=dropout,
        precision=precision,
    )
    return dispatch.explain(call, implementation)


def _call(where, query, key, value, mask, *, implementation=None, needs_value=True, **options):
    call, problems = checked_call(query, key, value, mask, **options)
    if needs_value and value is None:
        problems.append("value: expected an array (B, S, K, Hv), got None")
    checks.raise_all(where, problems + dispatch.implementation_problems(implementation))
    return call
