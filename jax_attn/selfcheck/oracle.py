r"""The float64 oracle: multi-head attention head by head, forward and backward, in NumPy.

It is written from the formulas, not from either port (seed 001; Vaswani et al. 2017):

    Q_i = f(X_q W_i^Q)    K_i = f(X_k W_i^K)    V_i = X_v W_i^V
    head_i = softmax(c(scale Q_i K_i^T) + bias + mask) V_i
    output = Concat(head_1, ..., head_N) W^O

with separate per-head matrices, a Python loop over batch and heads, and the
derivative of each line written out below it; f applies the steps in `AttentionProblem.after`.
Weights are read as torch stores them, (out, in), since the reference is a torch module. Sequence
axes keep the letters of the dimension key: T queries, S keys, H head size.

No bug can be planted here: planted bugs have their own formulas, in
`selfcheck.power.mutable_attention`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray
Back = Callable[[Array], tuple[Array, dict[str, Array]]]
"""A step's cotangent -> that of its input, and those of its weights."""


def softmax(scores_TS: Array) -> Array:
    """Return the row softmax of (T, S); a row that is all -inf gives zeros."""
    top_T1 = scores_TS.max(axis=-1, keepdims=True)
    weights_TS = np.exp(scores_TS - np.where(np.isneginf(top_T1), 0.0, top_T1))
    total_T1 = weights_TS.sum(axis=-1, keepdims=True)
    return np.divide(weights_TS, total_T1, out=np.zeros_like(weights_TS), where=total_T1 > 0)


def grouped(head: int, num_heads: int, num_kv_heads: int) -> int:
    """Return the key/value head that query head `head` reads: consecutive heads share one."""
    return head // (num_heads // num_kv_heads)


@dataclass(frozen=True)
class HeadNorm:
    """y = g (x - c mean(x)) / sqrt(mean((x - c mean(x))**2) + epsilon) + b, over one head.

    c is 1 if `centred` (LayerNorm), else 0 (RMSNorm); g and the optional b are the weights
    "q_norm.weight" (H,) and "q_norm.bias", and the same for k.
    """

    epsilon: float
    centred: bool = False

    def apply(self, name: str, x_TH: Array, weights: dict[str, Array]) -> tuple[Array, Back]:
        """Return y, and the map from its cotangent to those of x and of the weights."""
        gain_key, shift_key = f"{name}_norm.weight", f"{name}_norm.bias"
        gain = weights[gain_key]
        off_TH = x_TH - _mean(x_TH) if self.centred else x_TH
        root_T1 = np.sqrt(_mean(off_TH**2) + self.epsilon)
        unit_TH = off_TH / root_T1

        def back(d_y: Array) -> tuple[Array, dict[str, Array]]:
            d_unit = d_y * gain
            d_x = (d_unit - unit_TH * _mean(d_unit * unit_TH)) / root_T1
            d_x = d_x - _mean(d_x) if self.centred else d_x
            d_weights = {gain_key: (d_y * unit_TH).sum(axis=0), shift_key: d_y.sum(axis=0)}
            return d_x, {key: d for key, d in d_weights.items() if key in weights}

        return gain * unit_TH + weights.get(shift_key, 0.0), back


@dataclass(frozen=True)
class Turn:
    """Rotary positions: pairs of features as complex z -> z exp(i p base**(-2m/dim)) at position p.

    Pair m is the features (2m, 2m + 1) if `interleaved`, else (m, m + dim/2); features from dim on
    are unchanged. The first query is at position `first`, the first key at 0.
    """

    base: float
    dim: int
    interleaved: bool = False
    first: int = 0

    def apply(self, name: str, x_TH: Array, weights: dict[str, Array]) -> tuple[Array, Back]:
        """Return y, and the map from its cotangent to x's; there are no weights."""
        m = np.arange(self.dim // 2)
        positions = np.arange(len(x_TH)) + (self.first if name == "q" else 0)
        turns_TM = np.exp(1j * np.outer(positions, self.base ** (-2 * m / self.dim)))
        real, imaginary = (2 * m, 2 * m + 1) if self.interleaved else (m, m + self.dim // 2)

        def turned(a_TH: Array, by_TM: Array) -> Array:
            z_TM = (a_TH[:, real] + 1j * a_TH[:, imaginary]) * by_TM
            out_TH = a_TH.copy()
            out_TH[:, real], out_TH[:, imaginary] = z_TM.real, z_TM.imag
            return out_TH

        # A rotation's transpose is its inverse.
        return turned(x_TH, turns_TM), lambda d_y: (turned(d_y, turns_TM.conj()), {})


def _mean(a_TH: Array) -> Array:
    return a_TH.mean(axis=-1, keepdims=True)


@dataclass(frozen=True)
class AttentionProblem:
    """One attention layer and its inputs, in float64.

    inputs: name -> (B, T or S, features). `reads` names the input that each projection reads;
        in self-attention all three names are the same, and its gradients add up.
    weights: "q.weight" (N*H, D), "k.weight" (K*H, kdim), "v.weight" (K*Hv, vdim),
        "o.weight" (D, N*Hv) and optionally "q.bias" ... "o.bias".
    after: the steps applied to a head's projected queries and keys, in this order.
    allowed: boolean, broadcastable to (B, N, T, S), True = attend; None = all.
    bias: float, broadcastable to (B, N, T, S), added after the softcap; None = 0.
    kept: dropout's factor of the weights before they multiply the values, (B, N, T, S): 0 or
        1 / (1 - rate); None = 1. The weights of a `Solution` are those before dropout.

    Extra keys follow a head's S keys. Every query sees them; they have no bias, and `after` does
    not apply: the key "bias_k" (1, 1, K*H) with the value "bias_v" if the weights have them, and a
    key and a value of zeros if `add_zero_attn`. Each is one more column of the weights and of
    `kept`. Last, if the weights have "sinks" (N,), each head has its own score for a key without a
    value; its column is left out of the weights.
    """

    inputs: dict[str, Array]
    weights: dict[str, Array]
    num_heads: int
    num_kv_heads: int
    reads: dict[str, str] = field(default_factory=lambda: {"q": "query", "k": "key", "v": "value"})
    scale: float | None = None
    softcap: float | None = None
    after: tuple[HeadNorm | Turn, ...] = ()
    allowed: Array | None = None
    bias: Array | None = None
    kept: Array | None = None
    add_zero_attn: bool = False

    @property
    def extra_columns(self) -> int:
        """The number of extra keys that have a column of weights."""
        return ("bias_k" in self.weights) + self.add_zero_attn


@dataclass(frozen=True)
class Solution:
    """Output (B, T, D), weights (B, N, T, S or more); gradients of inputs, parameters and bias."""

    output: Array
    weights: Array
    input_grads: dict[str, Array]
    weight_grads: dict[str, Array]
    bias_grad: Array | None


def _project(x_TD: Array, weights: dict[str, Array], name: str, rows: slice) -> Array:
    y_TH = x_TD @ weights[f"{name}.weight"][rows].T
    return y_TH + weights[f"{name}.bias"][rows] if f"{name}.bias" in weights else y_TH


def _through(
    steps: tuple[HeadNorm | Turn, ...], name: str, x_TH: Array, weights: dict[str, Array]
) -> tuple[Array, Back]:
    """Apply all steps; also return the map from the cotangent to those of x and the weights."""
    backs: list[Back] = []
    for step in steps:
        x_TH, back = step.apply(name, x_TH, weights)
        backs.insert(0, back)

    def all_back(d_y: Array) -> tuple[Array, dict[str, Array]]:
        d_weights: dict[str, Array] = {}
        for back in backs:
            d_y, d_own = back(d_y)
            d_weights |= d_own
        return d_y, d_weights

    return x_TH, all_back


def solve(problem: AttentionProblem, d_output: Array, d_weights: Array | None = None) -> Solution:
    """Return outputs, and the gradients of <d_output, output> + <d_weights, weights>.

    d_output: (B, T, D). d_weights: of the weights' shape, or None if they are not an output.
    """
    w, inputs, reads = problem.weights, problem.inputs, problem.reads
    n_heads, n_kv = problem.num_heads, problem.num_kv_heads
    size = {"q": w["q.weight"].shape[0] // n_heads, "k": w["k.weight"].shape[0] // n_kv}
    size["v"] = w["v.weight"].shape[0] // n_kv
    scale = size["q"] ** -0.5 if problem.scale is None else problem.scale
    x = {name: inputs[reads[name]] for name in "qkv"}
    (B, T, _), S = x["q"].shape, x["k"].shape[1]
    own_keys, E = (B, n_heads, T, S), problem.extra_columns
    full = (B, n_heads, T, S + E)
    allowed, bias, kept = np.ones(full, bool), np.zeros(full), np.ones(full)
    allowed[..., :S] = np.broadcast_to(
        True if problem.allowed is None else problem.allowed, own_keys
    )
    bias[..., :S] = np.broadcast_to(0.0 if problem.bias is None else problem.bias, own_keys)
    kept *= 1.0 if problem.kept is None else problem.kept

    output = np.zeros((B, T, w["o.weight"].shape[0]))
    weights = np.zeros(full)
    d_inputs = {name: np.zeros(a.shape) for name, a in inputs.items()}
    d_params = {name: np.zeros(a.shape) for name, a in w.items()}
    d_bias = np.zeros(own_keys)

    def project_back(name: str, b: int, rows: slice, d_y: Array, own: dict[str, Array]) -> None:
        """Add the derivative of `_project` to the gradients of its weight, bias and input.

        own: gradients of the weights in `after`.
        """
        for key, d in own.items():
            d_params[key] += d
        d_params[f"{name}.weight"][rows] += d_y.T @ x[name][b]
        if f"{name}.bias" in w:
            d_params[f"{name}.bias"][rows] += d_y.sum(axis=0)
        d_inputs[reads[name]][b] += d_y @ w[f"{name}.weight"][rows]

    def head(a: Array, name: str, kv: int) -> Array:
        """Return a key/value head's part, (1, H), of (1, 1, K*H), as a view to write to."""
        return a.reshape(n_kv, 1, size[name])[kv]

    for b in range(B):
        concat_TNH = np.zeros((T, n_heads * size["v"]))
        d_concat_TNH = d_output[b] @ w["o.weight"]
        for n in range(n_heads):
            kv = grouped(n, n_heads, n_kv)
            rows = {"q": slice(n * size["q"], (n + 1) * size["q"])}
            rows |= {name: slice(kv * size[name], (kv + 1) * size[name]) for name in "kv"}
            q_TH, k_SH, v_SH = (_project(x[name][b], w, name, rows[name]) for name in "qkv")
            q_TH, q_back = _through(problem.after, "q", q_TH, w)
            k_SH, k_back = _through(problem.after, "k", k_SH, w)
            if "bias_k" in w:
                k_SH = np.concatenate([k_SH, head(w["bias_k"], "k", kv)])
                v_SH = np.concatenate([v_SH, head(w["bias_v"], "v", kv)])
            if problem.add_zero_attn:
                k_SH, v_SH = (np.concatenate([a, np.zeros_like(a[:1])]) for a in (k_SH, v_SH))

            scores_TS = scale * (q_TH @ k_SH.T)
            slope_TS = np.ones_like(scores_TS)
            if problem.softcap is not None:
                bent_TS = np.tanh(scores_TS / problem.softcap)
                scores_TS, slope_TS = problem.softcap * bent_TS, 1 - bent_TS**2
            scores_TS = np.where(allowed[b, n], scores_TS + bias[b, n], -np.inf)
            if "sinks" in w:
                scores_TS = np.concatenate([scores_TS, np.full((T, 1), w["sinks"][n])], axis=1)
            p_TS = softmax(scores_TS)
            p_T1, p_TS = p_TS[:, S + E :], p_TS[:, : S + E]
            own = slice(n * size["v"], (n + 1) * size["v"])
            concat_TNH[:, own] = (kept[b, n] * p_TS) @ v_SH
            weights[b, n] = p_TS

            d_head_TH = d_concat_TNH[:, own]
            d_p_TS = kept[b, n] * (d_head_TH @ v_SH.T)
            if d_weights is not None:
                d_p_TS = d_p_TS + d_weights[b, n]
            mean_T1 = (p_TS * d_p_TS).sum(axis=-1, keepdims=True)
            d_s_TS = p_TS * (d_p_TS - mean_T1)
            d_bias[b, n] = d_s_TS[:, :S]
            d_raw_TS = scale * slope_TS * d_s_TS
            d_k_SH, d_v_SH = d_raw_TS.T @ q_TH, (kept[b, n] * p_TS).T @ d_head_TH
            project_back("q", b, rows["q"], *q_back(d_raw_TS @ k_SH))
            project_back("k", b, rows["k"], *k_back(d_k_SH[:S]))
            project_back("v", b, rows["v"], d_v_SH[:S], {})
            if "bias_k" in w:
                head(d_params["bias_k"], "k", kv)[...] += d_k_SH[S]
                head(d_params["bias_v"], "v", kv)[...] += d_v_SH[S]
            if "sinks" in w:
                d_params["sinks"][n] -= (p_T1 * mean_T1).sum()

        output[b] = concat_TNH @ w["o.weight"].T + w.get("o.bias", 0.0)
        d_params["o.weight"] += d_output[b].T @ concat_TNH
        if "o.bias" in w:
            d_params["o.bias"] += d_output[b].sum(axis=0)

    own_d_bias = None if problem.bias is None else unbroadcast(d_bias, problem.bias.shape)
    return Solution(output, weights, d_inputs, d_params, own_d_bias)


def unbroadcast(a: Array, shape: tuple[int, ...]) -> Array:
    """Sum `a` over the axes along which `shape` was broadcast to it."""
    a = a.sum(axis=tuple(range(a.ndim - len(shape))))
    ones = tuple(i for i, n in enumerate(shape) if n == 1 and a.shape[i] != 1)
    return a.sum(axis=ones, keepdims=True)
