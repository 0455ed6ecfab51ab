r"""Attention in float64 in which any step can be made wrong, together with its gradients.

The formulas are those of `oracle`, for all heads at once and in torch, so that autograd
differentiates any plant: a bug is a table {step: wrong step}, and needs no compilation. The first
argument of a wrong step is the right one, which takes the other arguments:

    plants = {"scale": lambda right, p: 1.01 * right(p)}

No correct port is judged by this module: without plants it gives the oracle's results.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from jax_attn.selfcheck.oracle import AttentionProblem, HeadNorm, Solution, Turn

Plants = Mapping[str, Callable[..., Any]]
# An `AttentionProblem` whose inputs, weights and bias are tensors.
TensorProblem = Any


def solve(
    problem: AttentionProblem,
    d_output: np.ndarray,
    d_weights: np.ndarray | None,
    plants: Plants,
    gradients: bool = True,
) -> Solution:
    """Solve as `oracle.solve`, with `plants` in place of the steps of `STEPS` that they name.

    gradients: whether to compute them; if False, the solution has none.
    """
    leaves: TensorProblem = replace(
        cast(Any, problem),
        inputs=_leaves(problem.inputs),
        weights=_leaves(problem.weights),
        bias=None if problem.bias is None else _leaf(problem.bias),
    )
    step = {name: partial(plants[name], f) if name in plants else f for name, f in STEPS.items()}
    with torch.set_grad_enabled(gradients):
        output, weights = _forward(step["problem"](leaves), step)
    solved = output.detach().numpy(), weights.detach().numpy()
    if not gradients:
        return Solution(*solved, {}, {}, None)
    wrt = {
        **{("input", k): x for k, x in leaves.inputs.items()},
        **{("weight", k): x for k, x in leaves.weights.items()},
        **({("bias", ""): leaves.bias} if leaves.bias is not None else {}),
    }
    cotangents = [(output, d_output)]
    cotangents += [(weights, d_weights)] if d_weights is not None else []
    # Not as cotangents: torch's check of their shapes imports sympy, a third of a second.
    nothing = torch.zeros((), requires_grad=True)
    total = sum(((y * torch.tensor(d)).sum() for y, d in cotangents), start=nothing)
    grads = torch.autograd.grad(
        total, list(wrt.values()), allow_unused=True, materialize_grads=True
    )
    grads_of: dict[str, dict[str, np.ndarray]] = {"input": {}, "weight": {}, "bias": {}}
    for (kind, name), grad in zip(wrt, grads, strict=True):
        grads_of[kind][name] = grad.numpy()
    return Solution(*solved, grads_of["input"], grads_of["weight"], grads_of["bias"].get(""))


def _forward(p: TensorProblem, step: Mapping[str, Callable]) -> tuple[Tensor, Tensor]:
    """Return output (B, T, D) and weights (B, N, T, S), with a column for each extra key."""
    heads = {"q": p.num_heads, "k": p.num_kv_heads, "v": p.num_kv_heads}
    x = {}
    for name, count in heads.items():
        y = step["product"](p, p.inputs[p.reads[name]], p.weights[f"{name}.weight"].mT)
        y = step["split"](p, step["biased"](p, name, y), count)  # (B, count, T or S, H)
        x[name] = step["branch"](p, name, y)
    for name in ("q", "k"):
        x[name] = step["turned"](p, name, x[name])
    k, v = (step["shared"](p, x[name]) for name in ("k", "v"))
    columns = [step["hidden"](p, _scores(p, step, x["q"], k))]
    v = step["slots"](p, v)
    if p.extra_columns:
        k, v_extra = (step["shared"](p, y) for y in step["extra"](p))
        columns.append(step["seen"](p, _scores(p, step, x["q"], k)))
        v = torch.cat([v, v_extra.expand(len(v), -1, -1, -1)], dim=-2)
    if "sinks" in p.weights:
        columns.append(step["sinks"](p, columns[0]))
    weights = step["softmax"](p, torch.cat(columns, dim=-1))[..., : v.shape[-2]]
    mixed = step["product"](p, step["dropped"](p, weights), v)
    merged = mixed.transpose(1, 2).flatten(2)
    output = step["product"](p, merged, p.weights["o.weight"].mT)
    return step["biased"](p, "o", output), weights


def _scores(p: TensorProblem, step: Mapping[str, Callable], q: Tensor, k: Tensor) -> Tensor:
    return step["capped"](p, step["scale"](p) * step["product"](p, q, k.mT))


def biased(p: TensorProblem, name: str, y: Tensor) -> Tensor:
    return y + p.weights[f"{name}.bias"] if f"{name}.bias" in p.weights else y


def split(p: TensorProblem, y: Tensor, heads: int) -> Tensor:
    """Reshape (B, T, heads*H) to (B, heads, T, H)."""
    return y.unflatten(-1, (heads, -1)).transpose(1, 2)


def turned(p: TensorProblem, name: str, x: Tensor) -> Tensor:
    """Apply the steps in `p.after`, in order."""
    for each in p.after:
        x = _AFTER[type(each)](each, p, name, x)
    return x


def _normed(norm: HeadNorm, p: TensorProblem, name: str, x: Tensor) -> Tensor:
    off = x - x.mean(-1, keepdim=True) if norm.centred else x
    unit = off / (off.square().mean(-1, keepdim=True) + norm.epsilon).sqrt()
    return unit * p.weights[f"{name}_norm.weight"] + p.weights.get(f"{name}_norm.bias", 0.0)


def _rotated(turn: Turn, p: TensorProblem, name: str, x: Tensor) -> Tensor:
    m = torch.arange(turn.dim // 2)
    at = torch.arange(x.shape[-2]) + (turn.first if name == "q" else 0)
    angles = torch.outer(at.double(), turn.base ** (-2 * m.double() / turn.dim))
    real, imaginary = (2 * m, 2 * m + 1) if turn.interleaved else (m, m + turn.dim // 2)
    a, b, c, s = x[..., real], x[..., imaginary], angles.cos(), angles.sin()
    turned = x.clone()
    turned[..., real], turned[..., imaginary] = a * c - b * s, a * s + b * c
    return turned


_AFTER: dict[type, Callable[..., Tensor]] = {HeadNorm: _normed, Turn: _rotated}


def shared(p: TensorProblem, x: Tensor) -> Tensor:
    """Repeat (B, K, S, H) to (B, N, S, H): consecutive query heads share a key/value head."""
    return x.repeat_interleave(p.num_heads // p.num_kv_heads, dim=1)


def head_size(p: TensorProblem) -> int:
    return p.weights["q.weight"].shape[0] // p.num_heads


def scale(p: TensorProblem) -> float:
    return float(head_size(p) ** -0.5 if p.scale is None else p.scale)


def capped(p: TensorProblem, scores: Tensor) -> Tensor:
    return scores if p.softcap is None else p.softcap * torch.tanh(scores / p.softcap)


def hidden(p: TensorProblem, scores: Tensor) -> Tensor:
    """Add the bias, and replace masked scores with -inf."""
    scores = scores if p.bias is None else scores + p.bias
    allowed = True if p.allowed is None else torch.tensor(p.allowed)
    return torch.where(torch.as_tensor(allowed), scores, -torch.inf)


def softmax(p: TensorProblem, scores: Tensor) -> Tensor:
    """Return the row softmax; a row that is all -inf gives zeros."""
    top = scores.detach().amax(-1, keepdim=True)
    powers = torch.exp(scores - top.masked_fill(top.isneginf(), 0.0))
    total = powers.sum(-1, keepdim=True)
    return powers / total.masked_fill(total == 0, 1.0)


def extra(p: TensorProblem) -> tuple[Tensor, Tensor]:
    """Return the extra keys and values (1, K, extra columns, H): the learned one, then zeros."""
    both = []
    for name in ("k", "v"):
        H = p.weights[f"{name}.weight"].shape[0] // p.num_kv_heads
        zero = torch.zeros(1, p.num_kv_heads, 1, H, dtype=torch.float64)
        learned = [p.weights[f"bias_{name}"].view_as(zero)] if "bias_k" in p.weights else []
        both.append(torch.cat([*learned, *([zero] if p.add_zero_attn else [])], dim=2))
    return both[0], both[1]


def sinks(p: TensorProblem, scores: Tensor) -> Tensor:
    """Return each head's sink as a column next to these scores, (B, N, T, 1)."""
    return p.weights["sinks"][:, None, None].expand(*scores.shape[:3], 1)


def dropped(p: TensorProblem, weights: Tensor) -> Tensor:
    return weights if p.kept is None else weights * torch.tensor(p.kept)


STEPS: dict[str, Callable] = {
    "problem": lambda p: p,  # the port's arguments: masks, weights
    "product": lambda p, a, b: a @ b,  # every product, six without extra keys
    "biased": biased,
    "split": split,
    "branch": lambda p, name, x: x,  # the projections' outputs, by name
    "turned": turned,
    "shared": shared,
    "scale": scale,
    "capped": capped,
    "hidden": hidden,
    "extra": extra,
    "seen": lambda p, scores: scores,  # those of extra keys, which no mask hides
    "sinks": sinks,
    "softmax": softmax,
    "dropped": dropped,
    "slots": lambda p, v: v,  # the order of values, which is that of their keys
}


def _leaf(a: np.ndarray) -> Tensor:
    return torch.tensor(a, dtype=torch.float64, requires_grad=True)


def _leaves(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: _leaf(a) for name, a in arrays.items()}
