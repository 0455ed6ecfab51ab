"""Ways to plant a bug in the steps of attention."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from jax_attn.attention.kernels.tile_sizes import KEYS
from jax_attn.attention.kv_cache import PageSizes
from jax_attn.parity.bugs.masks import HIDDEN
from jax_attn.selfcheck.matrix.cached_calls import pieces
from jax_attn.selfcheck.power.mutable_attention import Plants, TensorProblem

Change = Callable[[TensorProblem], TensorProblem]


def changed_problem(change: Change) -> Plants:
    """Give the port another problem."""
    return {"problem": lambda right, p: change(right(p))}


def masked(change: Callable[[np.ndarray], np.ndarray]) -> Plants:
    """Give the port another mask. change: of a copy of what queries may attend to."""
    return changed_problem(lambda p: replace(p, allowed=change(np.array(p.allowed))))


def hiding(name: str) -> Plants:
    """Give the port a mask as the catalogue changes it. name: a key of `bugs.masks.HIDDEN`."""
    _, change = HIDDEN[name]
    return masked(lambda allowed: ~change(torch.tensor(~allowed)).numpy())


def own_piece(allowed: np.ndarray) -> np.ndarray:
    """Hide the keys that are in the cache."""
    sizes = pieces(allowed.shape[-1])
    piece = np.repeat(np.arange(len(sizes)), sizes)
    return allowed & (piece[:, None] == piece)


def last_tile(p: TensorProblem) -> int:
    """Return the first key of the last tile, for shipped tiles."""
    return (p.inputs[p.reads["k"]].shape[1] - 1) // KEYS * KEYS


def last_tile_dropped(p: TensorProblem) -> TensorProblem:
    T, S = (p.inputs[p.reads[name]].shape[1] for name in "qk")
    kept = np.broadcast_to(np.arange(S) < last_tile(p), (T, S))
    return replace(p, allowed=kept if p.allowed is None else kept & np.array(p.allowed))


def own_maximum(right: Callable, p: TensorProblem, scores: Tensor) -> Tensor:
    """Sum tile by tile without rescaling the earlier sums when the maximum grows."""
    tops = [tile.detach().amax(-1, keepdim=True) for tile in scores.split(KEYS, -1)]
    tops = [top.masked_fill(top.isneginf(), 0.0) for top in tops]
    tiles = zip(scores.split(KEYS, -1), tops, strict=True)
    powers = torch.cat([torch.exp(tile - top) for tile, top in tiles], -1)
    total = powers.sum(-1, keepdim=True)
    return powers / total.masked_fill(total == 0, 1.0)


def last_tile_stopped(right: Callable, p: TensorProblem, name: str, x: Tensor) -> Tensor:
    """Stop the gradient of the keys (B, K, S, H) in the last tile."""
    first = last_tile(p)
    return torch.cat([x[..., :first, :], x[..., first:, :].detach()], -2) if name == "k" else x


def page_edge_forgotten(allowed: np.ndarray) -> np.ndarray:
    """Hide the last token of the first page from every token of the later pages."""
    allowed[..., PageSizes.first :, PageSizes.first - 1] = False
    return allowed


def reads(**sources: str) -> Plants:
    """Give projections the weights of others: q="k"."""

    def change(p: TensorProblem) -> TensorProblem:
        w = p.weights
        read = {
            f"{to}.{part}": w[f"{of}.{part}"]
            for to, of in sources.items()
            for part in ("weight", "bias")
            if f"{of}.{part}" in w
        }
        return replace(p, weights=w | read)

    return changed_problem(change)


def transposed(name: str) -> Plants:
    key = f"{name}.weight"
    return changed_problem(lambda p: replace(p, weights=p.weights | {key: p.weights[key].mT}))


def each(kind: type, change: Callable) -> Plants:
    """Change every step of one kind after the projections."""

    def changed(p: TensorProblem) -> TensorProblem:
        return replace(p, after=tuple(change(s) if isinstance(s, kind) else s for s in p.after))

    return changed_problem(changed)


def rounded(x: Tensor, bits: int) -> Tensor:
    """Round to `bits` bits of significand; the gradient ignores the rounding."""
    mantissa, exponent = torch.frexp(x.detach())
    near = torch.ldexp(torch.round(mantissa * 2.0**bits) / 2.0**bits, exponent)
    return x + (near - x.detach())


def summed(right: Callable, p: TensorProblem, a: Tensor, b: Tensor, bits: int) -> Tensor:
    """Round every partial sum of a product."""
    exact = right(p, a, b)
    total = torch.zeros_like(exact)
    for i in range(a.shape[-1]):
        term = a.detach()[..., i : i + 1] * b.detach()[..., i : i + 1, :]
        total = rounded(total + term, bits)
    return exact + (total - exact.detach())


def narrow(bits: int) -> Plants:
    """Round the parameters to another dtype."""
    return changed_problem(
        lambda p: replace(p, weights={k: rounded(x, bits) for k, x in p.weights.items()})
    )


def scaled(by: Callable[[TensorProblem, float], float]) -> Plants:
    return {"scale": lambda right, p: by(p, right(p))}


def stopped(name: str) -> Plants:
    return {"branch": lambda right, p, n, x: x.detach() if n == name else x}


def one_head_sends(right: Callable, p: TensorProblem, x: Tensor) -> Tensor:
    """Send a shared key/value head the gradient of only the first of its query heads."""
    first = torch.arange(p.num_heads) % (p.num_heads // p.num_kv_heads) == 0
    read = right(p, x)
    return torch.where(first[:, None, None], read, read.detach())


def rolled_heads(right: Callable, p: TensorProblem, y: Tensor, heads: int) -> Tensor:
    """Reorder query, key and value heads alike, but not the output's kernel."""
    G = heads // p.num_kv_heads
    return right(p, y, heads).roll(1 if p.num_kv_heads == 1 < heads else G, dims=1)


def plus_one(right: Callable, p: TensorProblem, scores: Tensor) -> Tensor:
    """Add 1 to the softmax's denominator."""
    zero = torch.zeros_like(scores[..., :1])
    return right(p, torch.cat([scores, zero], dim=-1))[..., :-1]


def mean_where_empty(right: Callable, p: TensorProblem, scores: Tensor) -> Tensor:
    empty = scores.isneginf().all(-1, keepdim=True)
    return right(p, scores.masked_fill(empty, 0.0))


def finite_mask(right: Callable, p: TensorProblem, scores: Tensor) -> Tensor:
    """Add -1e4 where -inf belongs."""
    seen = right(replace(p, allowed=None), scores)
    return torch.where(torch.tensor(p.allowed), seen, seen - 1e4)


def dropping(right: Callable, p: TensorProblem, weights: Tensor) -> Tensor:
    """Drop every tenth weight, and scale up the others."""
    kept = torch.arange(weights.numel()).reshape(weights.shape) % 10 != 0
    return right(p, weights) * kept / 0.9
