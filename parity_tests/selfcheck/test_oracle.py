"""The oracle: derivatives by finite differences, and the packed form equal to head by head."""

import numpy as np
import pytest

from helpers.parity.oracle_problem import (
    AFTER,
    BASE,
    EPSILON,
    B,
    D,
    H,
    K,
    N,
    S,
    T,
    cotangents,
    problem,
    with_extra_keys,
)
from jax_attn.selfcheck.oracle import AttentionProblem, solve


def loss(posed: AttentionProblem) -> float:
    d_output, d_weights = cotangents(extra_columns=posed.extra_columns)
    solution = solve(posed, d_output, d_weights)
    return float((solution.output * d_output).sum() + (solution.weights * d_weights).sum())


def leaves(posed: AttentionProblem) -> dict[str, np.ndarray]:
    return posed.inputs | posed.weights | {"bias": posed.bias}


def gradients(posed: AttentionProblem) -> dict[str, np.ndarray]:
    solution = solve(posed, *cotangents(extra_columns=posed.extra_columns))
    return solution.input_grads | solution.weight_grads | {"bias": solution.bias_grad}


POSED = {name: problem(after=after) for name, after in AFTER.items()}
POSED["extra keys"] = with_extra_keys(problem())


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, posed in POSED.items() for name in leaves(posed)]
)
def test_every_gradient_is_the_slope_of_the_loss(kind, name):
    """Along a random direction; a central difference errs by step**2 and by u/step."""
    posed = POSED[kind]
    leaf = leaves(posed)[name]
    direction = np.random.default_rng(2).standard_normal(leaf.shape)
    step = 2.0**-17
    slope = 0.0
    kept = leaf.copy()
    for sign in (1, -1):
        leaf[...] = kept + sign * step * direction
        slope += sign * loss(posed) / (2 * step)
    leaf[...] = kept
    derivative = float((gradients(posed)[name] * direction).sum())
    # Second-order error step**2 and cancellation 2**-52/step, both times the loss's size.
    assert abs(slope - derivative) <= 1e3 * (step**2 + 2.0**-52 / step) * max(abs(derivative), 1.0)


def after_projection(posed: AttentionProblem, name: str, x: np.ndarray) -> np.ndarray:
    """Over the last axis of (B, heads, T, H): norm by statistics, turn by a matrix of each step."""
    w, (norm, turn) = posed.weights, posed.after
    off = x - x.mean(-1, keepdims=True) if norm.centred else x
    x = off / np.sqrt(np.square(off).mean(-1, keepdims=True) + EPSILON)
    x = x * w[f"{name}_norm.weight"] + w[f"{name}_norm.bias"]
    pairs = ((0, 1), (2, 3)) if turn.interleaved else ((0, 2), (1, 3))
    out = np.zeros_like(x)
    for t in range(x.shape[2]):
        matrix = np.eye(H)
        for pair, frequency in zip(pairs, (1, BASE**-0.5), strict=True):
            angle = frequency * (t + turn.first if name == "q" else t)
            c, s = np.cos(angle), np.sin(angle)
            matrix[np.ix_(pair, pair)] = [[c, -s], [s, c]]
        out[:, :, t] = x[:, :, t] @ matrix.T
    return out


def packed(posed: AttentionProblem) -> np.ndarray:
    """The usual form: one product for all heads, K repeated, one softmax over the last axis."""
    w, x = posed.weights, posed.inputs

    def heads(name: str, source: str, count: int) -> np.ndarray:
        y = x[source] @ w[f"{name}.weight"].T + w[f"{name}.bias"]
        return y.reshape(B, -1, count, H).transpose(0, 2, 1, 3)

    q = after_projection(posed, "q", heads("q", "query", N))
    k, v = heads("k", "key", K), heads("v", "value", K)
    k, allowed, bias = after_projection(posed, "k", k), posed.allowed, posed.bias
    if posed.add_zero_attn:  # and all else: a sink is a zero key with a bias
        row_1K1H = [w[name].reshape(1, K, 1, H) for name in ("bias_k", "bias_v")]
        k, v = (
            np.concatenate([a, np.repeat(row, B, axis=0), np.zeros((B, K, 2, H))], axis=2)
            for a, row in zip((k, v), row_1K1H, strict=True)
        )
        sinks_NTE = np.zeros((N, T, 3)) + w["sinks"][:, None, None] * [0, 0, 1]
        bias = np.concatenate([bias, sinks_NTE[None]], axis=-1)
        allowed = np.pad(allowed, [(0, 0)] * 3 + [(0, 3)], constant_values=True)
    k, v = (np.repeat(a, N // K, axis=1) for a in (k, v))
    scores = posed.softcap * np.tanh(posed.scale * q @ k.swapaxes(-1, -2) / posed.softcap)
    scores = np.where(allowed, scores + bias, -np.inf)
    top = np.maximum(scores.max(axis=-1, keepdims=True), -1e300)
    e = np.exp(scores - top)
    total = e.sum(axis=-1, keepdims=True)
    weights = np.where(total > 0, e / np.where(total > 0, total, 1), 0)
    joined = (weights @ v).transpose(0, 2, 1, 3).reshape(B, T, N * H)
    return joined @ w["o.weight"].T + w["o.bias"]


@pytest.mark.parametrize("posed", POSED.values(), ids=POSED)
def test_the_packed_form_equals_the_form_head_by_head(posed):
    ours, usual = solve(posed, cotangents()[0]).output, packed(posed)
    # Two float64 programs of about N*H + D + S additions on values of this size.
    assert np.abs(ours - usual).max() <= 2.0**-52 * (N * H + D + S) * np.abs(usual).max() * 4


def test_a_row_that_may_attend_to_nothing_gives_the_output_bias_and_sends_nothing():
    posed = problem()
    solution = solve(posed, *cotangents())
    assert not solution.weights[1, :, 2].any()
    assert np.array_equal(solution.output[1, 2], posed.weights["o.bias"])
    assert not solution.input_grads["query"][1, 2].any()
