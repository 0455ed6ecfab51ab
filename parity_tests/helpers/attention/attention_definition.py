"""Attention by its definition: NumPy, float64, one head of one batch row at a time.

Shares no code with the package. ``attend`` gives output and weights, ``gradients`` what the
chain rule says, ``forward_budget`` and ``gradient_budget`` how far correct code may be off.
"""

import numpy as np

ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


def head(q_TH, k_SH, v_SH, allowed_TS, bias_TS, scale, softcap, kept_TS):
    """One head: output, weights, and what the backward pass needs."""
    raw = scale * q_TH @ k_SH.T
    slope = np.ones_like(raw)
    if softcap is not None:
        slope = 1 - np.tanh(raw / softcap) ** 2
        raw = softcap * np.tanh(raw / softcap)
    scores = np.where(allowed_TS, raw + bias_TS, -np.inf)
    P = np.zeros_like(scores)
    for t, row in enumerate(scores):
        if row.max() > -np.inf:
            P[t] = np.exp(row - row.max())
            P[t] /= P[t].sum()
    return (P * kept_TS) @ v_SH, P, slope


def _full(x, shape, default):
    return np.broadcast_to(np.float64(default if x is None else x), shape)


def _heads(q, k, v, allowed=None, bias=None, scale=None, softcap=None, keep=None, rate=0.0):
    """What head() takes, for each (b, n); query head n reads key/value head n // G."""
    (B, T, N, H), S = q.shape, k.shape[1]
    G = N // k.shape[2]
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    allowed = np.broadcast_to(True if allowed is None else allowed, (B, N, T, S))
    bias = _full(bias, (B, N, T, S), 0)
    kept = _full(keep, (B, N, T, S), 1) * (1.0 if rate == 0 else 1 / (1 - rate))
    scale = H**-0.5 if scale is None else scale
    for b in range(B):
        for n in range(N):
            arrays = q[b, :, n], k[b, :, n // G], v[b, :, n // G]
            yield b, n, n // G, (*arrays, allowed[b, n], bias[b, n], scale, softcap, kept[b, n])


def attend(q, k, v, **options):
    """Output (B, T, N, Hv) and weights (B, N, T, S)."""
    (B, T, N, _), S = q.shape, k.shape[1]
    out, weights = np.zeros((B, T, N, v.shape[3])), np.zeros((B, N, T, S))
    for b, n, _, arguments in _heads(q, k, v, **options):
        out[b, :, n], weights[b, n], _ = head(*arguments)
    return out, weights


def gradients(cotangent, q, k, v, absolute=False, **options):
    """Gradients of q, k, v and of a bias (B, N, T, S), for the output's cotangent.

    absolute adds up magnitudes instead, so that nothing cancels: the scale of the rounding error.
    """
    size = np.abs if absolute else np.asarray
    sign = 1 if absolute else -1
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    dbias = np.zeros((q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    for b, n, g, arguments in _heads(q, k, v, **options):
        _, P, slope = head(*arguments)
        q_TH, k_SH, v_SH, scale, kept = (size(arguments[i]) for i in (0, 1, 2, 5, 7))
        d_TH = size(np.float64(cotangent[b, :, n]))
        dP = d_TH @ v_SH.T * kept
        dbias[b, n] = P * (dP + sign * (P * dP).sum(-1, keepdims=True))
        dscores = dbias[b, n] * slope * scale
        dq[b, :, n] += dscores @ k_SH
        dk[b, :, g] += dscores.T @ q_TH
        dv[b, :, g] += (P * kept).T @ d_TH
    return dq, dk, dv, dbias


def _growth(q, k, v, scale=None, bias=None, **_):
    """Relative error of a weighted sum, in units of the roundoff of what accumulates.

    A score off by ε changes its weight by the factor 1 ± ε and the sum of the row by as much: 2ε.
    ε is (√H + 3)·Σ|q·k| for the product, the scale and the cap, and |bias| once more for the
    addition. The sums over S and Hv add √S and √Hv; exp, division and dropout a few roundings.
    """
    (B, T, N, H), (_, S, K, Hv) = q.shape, v.shape
    q, k = (np.abs(np.asarray(x, np.float64)) for x in (q, k))
    scale = H**-0.5 if scale is None else scale
    score = scale * np.einsum("btkgh,bskh->bkgts", q.reshape(B, T, K, N // K, H), k).max()
    finite = np.nan_to_num(np.float64(0 if bias is None else bias), neginf=0)
    return 2 * ((np.sqrt(H) + 3) * score + np.abs(finite).max()) + np.sqrt(S) + np.sqrt(Hv) + 8


def forward_budget(dtype, q, k, v, roundings=1, **options):
    """By how much each element of output and weights may be off.

    roundings: of numbers to the dtype on the way to an output, its storage among them.
    """
    u = ROUNDOFF["float64" if dtype == "float64" else "float32"]
    out, weights = attend(q, k, np.abs(np.asarray(v, np.float64)), **options)
    relative = u * _growth(q, k, v, **options) + roundings * ROUNDOFF[dtype]
    # A weight under the dtype's normal range has lost bits: absolute, not relative, there.
    tiny = 2.0**-25 if dtype == "float16" else 2.0**-126
    return relative * out + tiny, relative * weights + tiny


def gradient_budget(dtype, cotangent, q, k, v, roundings=(1, 1, 1, 1), **options):
    """By how much each element of the gradients may be off.

    Twice the forward's growth, since weights enter twice; storage in the dtype at the end.
    roundings: as in `forward_budget`, for each of the gradients.
    """
    u = ROUNDOFF["float64" if dtype == "float64" else "float32"]
    magnitudes = gradients(cotangent, q, k, v, absolute=True, **options)
    growth = 2 * u * _growth(q, k, v, **options)
    tiny = 2.0**-25 if dtype == "float16" else 2.0**-126
    relative = (growth + n * ROUNDOFF[dtype] for n in roundings)
    return tuple(r * x + tiny for r, x in zip(relative, magnitudes, strict=True))


def worst(got, want, budget) -> float:
    """The largest error in units of its budget; infinite for what is not finite."""
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    ratio = np.abs(got - want) / budget
    return float(np.where(np.isfinite(got), ratio, np.inf).max())
