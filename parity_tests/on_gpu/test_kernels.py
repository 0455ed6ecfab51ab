"""Each kernel on a GPU, forward and backward, against the definition in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.attention import attention_definition as definition
from jax_attn.attention import Mask, dot_product_attention, explain_kernel

B, T, S, N, K, H = 2, 66, 130, 6, 3, 64
RNG = np.random.default_rng(3)
ALLOWED = RNG.random((B, 1, T, S)) < 0.5
ALLOWED[0, :, 2] = False
BIAS = RNG.standard_normal((N, T, S))
BIAS[2, 4, :70] = -np.inf

# mask and bias
ROWS = {
    "open": (None, None),
    "causal": (Mask.causal(), None),
    "window": (Mask.window(20, 0), None),
    "lengths, one of them 0": (Mask.lengths([0, 91]), None),
    "array": (Mask.array(ALLOWED), None),
    "bias": (None, BIAS),
    "bias, lengths, causal": (Mask.lengths([13, 91]) & Mask.causal(), BIAS),
}
SERVED = {
    "cudnn": ("float16", "bfloat16"),
    "blocked": ("float16", "bfloat16", "float32"),
    "dense": ("float16", "bfloat16", "float32"),
}
# A vendor's kernel multiplies in the inputs' dtype. Output: the weights are rounded, and the sum is
# stored. Query: the backward pass reads the output as it is stored, the scores' gradients are
# rounded, and their sum is stored. Key and value: as the query and as the output, and each head of
# a group is stored before they are added up.
ROUNDINGS = {"cudnn": (2, (3, 4, 3, 3))}
CASES = [(kernel, dtype, row) for kernel in SERVED for dtype in SERVED[kernel] for row in ROWS]


@pytest.fixture(autouse=True)
def on_gpu():
    with jax.default_device(jax.devices("gpu")[0]), jax.default_matmul_precision("highest"):
        yield


def drawn(dtype):
    """query, key, value and a cotangent, exact in dtype."""
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H)
    rng = np.random.default_rng(7)
    return [rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes]


@pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize(("kernel", "dtype", "row"), CASES)
def test_it_is_attention_forward_and_backward(kernel, dtype, row, compiled):
    *arrays, cotangent = drawn(dtype)
    mask, bias = ROWS[row]
    bias = None if bias is None else bias.astype(jnp.dtype(dtype))

    def run(cotangent, *arrays):
        def attend(q, k, v):
            return dot_product_attention(q, k, v, mask, bias=bias, implementation=kernel)

        out, pull = jax.vjp(attend, *arrays)
        return out, *pull(cotangent)

    found = (jax.jit(run) if compiled else run)(cotangent, *arrays)
    allowed = None if mask is None else np.asarray(mask.materialize(T, S))
    forward, backward = ROUNDINGS.get(kernel, (1, (1, 1, 1, 1)))
    given = {"allowed": allowed, "bias": None if bias is None else bias.astype(np.float64)}
    want, _ = definition.attend(*arrays, **given)
    budget, _ = definition.forward_budget(dtype, *arrays, roundings=forward, **given)
    gradients = definition.gradients(cotangent, *arrays, **given)
    budgets = definition.gradient_budget(dtype, cotangent, *arrays, roundings=backward, **given)
    assert {x.devices().pop().platform for x in found} == {"gpu"}
    pairs = [(want, budget), *zip(gradients, budgets, strict=True)][:4]
    errors = [definition.worst(x, *pair) for x, pair in zip(found, pairs, strict=True)]
    assert max(errors) <= 1, errors


def test_cudnn_is_chosen_where_it_serves_the_call():
    q, k, v, _ = (jnp.asarray(x) for x in drawn("bfloat16"))
    assert explain_kernel(q, k, v, is_causal=True).chosen == "cudnn"
