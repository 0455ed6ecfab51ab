"""dot_product_attention and attention_weights do what their definition says, by each kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.attention import attention_definition as definition
from helpers.attention.attention_cases import (
    BIAS_NTS,
    CASES,
    DTYPES,
    B,
    H,
    N,
    S,
    T,
    by_each_kernel,
    cols,
    dot_product_attention,
    draw,
    one_kernel,
    rows,
    value_and_gradients,
)
from jax_attn.attention import Mask, attention_weights

pytestmark = [by_each_kernel, pytest.mark.filterwarnings("error")]

cases = pytest.mark.parametrize("name", CASES)
# Each of blocked's is a program of its own: the rows that "all at once" does not contain.
BLOCKED = (
    *("plain", "causal, row by row", "window", "window open to the right", "segments"),
    *("array (T, S)", "array per key", "bias of -inf", "empty rows"),
    *("rows emptied by mask and bias together", "all at once"),
)


def without_dropout(options):
    return {k: v for k, v in options.items() if k not in ("dropout", "keep", "rate")}


def check_all(dtype, run, cotangent, arrays, wanted):
    """Output and gradients of run, each within its budget."""
    out, _ = definition.attend(*arrays, **wanted)
    budget, _ = definition.forward_budget(dtype, *arrays, **wanted)
    got = run(cotangent, *arrays)
    assert got[0].dtype == dtype
    assert definition.worst(got[0], out, budget) <= 1
    wants = definition.gradients(cotangent, *arrays, **wanted)
    budgets = definition.gradient_budget(dtype, cotangent, *arrays, **wanted)
    for name, g, want, budget in zip("qkvb", got[1:], wants, budgets, strict=True):
        assert definition.worst(g, want, budget) <= 1, name


# Another kernel's output is held to the definition with its gradients; weights are no kernel's.
@one_kernel
@cases
def test_output_and_weights_are_the_definition(name):
    q, k, v, _ = draw(1)
    told, wanted = CASES[name]
    out, weights = definition.attend(q, k, v, **wanted)
    out_budget, weights_budget = definition.forward_budget("float32", q, k, v, **wanted)
    assert definition.worst(dot_product_attention(q, k, v, **told), out, out_budget) <= 1
    got = attention_weights(q, k, **without_dropout(told))
    assert definition.worst(got, weights, weights_budget) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "name"),
    [("dense", name) for name in CASES] + [("blocked", name) for name in BLOCKED],
    indirect=["kernel"],
)
def test_gradients_are_the_chain_rule(kernel, name):
    *arrays, cotangent = draw(2)
    told, wanted = CASES[name]

    def run(cotangent, *arrays):
        return value_and_gradients(cotangent, *arrays, **told)

    # Dense's operations compile once for all rows; blocked's loops for each, forward and backward.
    eager = kernel == "dense"
    check_all("float32", run if eager else jax.jit(run), cotangent, arrays, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "dtype", "jitted"),
    [("dense", "float16", False)]
    + [(each, dtype, True) for each in ("dense", "blocked") for dtype in DTYPES],
    indirect=["kernel"],
)
def test_every_dtype_forward_and_backward(dtype, jitted):
    told, wanted = CASES["all at once"]
    with jax.enable_x64(dtype == "float64"):
        *arrays, cotangent = draw(3, dtype)

        def run(cotangent, *arrays):
            return value_and_gradients(cotangent, *arrays, **told)

        check_all(dtype, jax.jit(run) if jitted else run, cotangent, arrays, wanted)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])  # and 3, above
def test_query_head_n_reads_kv_head_n_over_g(kv_heads):
    *arrays, cotangent = draw(4, kv_heads=kv_heads)
    check_all("float32", jax.jit(value_and_gradients), cotangent, arrays, {})


MISTAKES = {
    "scale off by 1%": {"scale": 1.01 * H**-0.5},
    "causal off by one": {"mask": Mask.causal(1)},
    "mask turned round": {"mask": cols > rows},
    "bias dropped": {"bias": None},
    "softcap dropped": {"softcap": None},
    "bias scaled with the scores": {"bias": BIAS_NTS * H**-0.5},
    "dropout not rescaled": {"dropout": None},
}


@one_kernel
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_sees_a_mistake(mistake):
    q, k, v, _ = draw(5)
    told = {"mask": Mask.causal(), "bias": BIAS_NTS, "softcap": 2.0}
    wanted = {"allowed": cols <= rows, "bias": BIAS_NTS, "softcap": 2.0}
    if "dropout" in mistake:
        wanted |= {"keep": np.ones((B, N, T, S), bool), "rate": 0.1}
    out, _ = definition.attend(q, k, v, **wanted)
    budget, _ = definition.forward_budget("float32", q, k, v, **wanted)
    got = dot_product_attention(q, k, v, **(told | MISTAKES[mistake]))
    assert definition.worst(got, out, budget) > 10


@pytest.mark.slow
@one_kernel
@pytest.mark.parametrize("branch", ["query", "key", "value"])
def test_the_check_sees_a_gradient_stopped(branch):
    *arrays, cotangent = draw(5)

    def run(cotangent, *arrays):
        def stopped(*arrays):
            cut = dict(zip(("query", "key", "value"), arrays, strict=True))
            # Half the gradient is lost, the value is not.
            cut[branch] = (cut[branch] + jax.lax.stop_gradient(cut[branch])) / 2
            return dot_product_attention(*cut.values(), bias=jnp.zeros((B, N, T, S)))

        out, backward = jax.vjp(stopped, *map(jnp.asarray, arrays))
        _, _, _, dbias = definition.gradients(cotangent, *arrays)
        return out, *backward(jnp.asarray(cotangent)), dbias

    with pytest.raises(AssertionError, match=branch[0]):
        check_all("float32", run, cotangent, arrays, {})


@one_kernel
def test_the_check_sees_tiled_heads():
    q, k, v, _ = draw(6)
    out, _ = definition.attend(q, k, v)
    budget, _ = definition.forward_budget("float32", q, k, v)
    tiled = dot_product_attention(q, jnp.tile(k, (1, 1, 2, 1)), jnp.tile(v, (1, 1, 2, 1)))
    assert definition.worst(tiled, out, budget) > 10
