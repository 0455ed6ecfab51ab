"""A problem for the oracle whose axes all differ, with one row that may attend to nothing."""

from dataclasses import replace

import numpy as np

from jax_attn.selfcheck.oracle import AttentionProblem, HeadNorm, Turn

B, T, S, N, K, H, D, KDIM, VDIM = 2, 3, 5, 4, 2, 5, 7, 6, 8
BASE, EPSILON = 3.0, 0.2


AFTER = {
    "LayerNorm, interleaved pairs": (
        HeadNorm(EPSILON, centred=True),
        Turn(BASE, 4, interleaved=True),
    ),
    "RMSNorm, pairs of two halves": (HeadNorm(EPSILON), Turn(BASE, 4, first=6)),
}


def problem(seed: int = 0, **changed) -> AttentionProblem:
    rng = np.random.default_rng(seed)
    draw = rng.standard_normal
    allowed = rng.random((B, 1, T, S)) < 0.6
    allowed[..., 0] = True
    allowed[1, 0, 2] = False  # one row that may attend to nothing
    made = AttentionProblem(
        inputs={"query": draw((B, T, D)), "key": draw((B, S, KDIM)), "value": draw((B, S, VDIM))},
        weights={
            "q.weight": draw((N * H, D)),
            "q.bias": draw(N * H),
            "k.weight": draw((K * H, KDIM)),
            "k.bias": draw(K * H),
            "v.weight": draw((K * H, VDIM)),
            "v.bias": draw(K * H),
            "o.weight": draw((D, N * H)),
            "o.bias": draw(D),
            "q_norm.weight": draw(H),
            "q_norm.bias": draw(H),
            "k_norm.weight": draw(H),
            "k_norm.bias": draw(H),
        },
        num_heads=N,
        num_kv_heads=K,
        scale=0.2,
        softcap=1.5,
        after=AFTER["LayerNorm, interleaved pairs"],
        allowed=allowed,
        bias=draw((1, N, T, S)),
    )
    return replace(made, **changed)


def with_extra_keys(posed: AttentionProblem) -> AttentionProblem:
    """With a learned key, one of zeros and sinks; the empty row attends to these."""
    draw = np.random.default_rng(3).standard_normal
    extra = {"bias_k": draw((1, 1, K * H)), "bias_v": draw((1, 1, K * H)), "sinks": draw(N)}
    return replace(posed, weights=posed.weights | extra, add_zero_attn=True)


def cotangents(seed: int = 1, extra_columns: int = 0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((B, T, D)), rng.standard_normal((B, N, T, S + extra_columns))
