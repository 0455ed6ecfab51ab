"""Bugs of extra keys, which follow the sequence's own: learned, of zeros, and sinks."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from jax_attn.selfcheck.oracle import Turn
from jax_attn.selfcheck.power import claims
from jax_attn.selfcheck.power.bug import ClaimedBug
from jax_attn.selfcheck.power.mutable_attention import Plants, TensorProblem, scale, turned

Pair = tuple[Tensor, Tensor]


def learned(change: Callable[[TensorProblem, Tensor, Tensor], Pair]) -> Plants:
    """Change the learned key and value (1, K, 1, H)."""

    def extra(right: Callable[[TensorProblem], Pair], p: TensorProblem) -> Pair:
        own, rest = zip(*(y.split([1, p.extra_columns - 1], dim=2) for y in right(p)), strict=True)
        k, v = (torch.cat(both, dim=2) for both in zip(change(p, *own), rest, strict=True))
        return k, v

    return {"extra": extra}


def in_place_of_zero(value: Callable[[TensorProblem, str], Tensor]) -> Plants:
    """Replace the zero key and value with value(p, "k" or "v"), which broadcasts."""

    def extra(right: Callable[[TensorProblem], Pair], p: TensorProblem) -> Pair:
        k, v = (
            torch.cat([y[:, :, :-1], value(p, name).expand_as(y[:, :, -1:])], dim=2)
            for name, y in zip("kv", right(p), strict=True)
        )
        return k, v

    return {"extra": extra}


def projected(p: TensorProblem, name: str) -> Tensor:
    """Return the projection of an input of zeros, which is its bias."""
    return p.weights[f"{name}.bias"].view(1, p.num_kv_heads, 1, -1)


def rotated(p: TensorProblem, k: Tensor, v: Tensor) -> Pair:
    """Rotate the learned key as a key of the text, after its last one."""
    S = p.inputs[p.reads["k"]].shape[1]
    return turned(p, "k", k.expand(-1, -1, S + 1, -1))[:, :, -1:], v


def hidden_by_the_mask(right: Callable, p: TensorProblem, scores: Tensor) -> Tensor:
    """Hide the extra keys, as a mask does that is padded for them with False."""
    return scores if p.allowed is None else torch.full_like(scores, -torch.inf)


def spared(right: Callable, p: TensorProblem, weights: Tensor) -> Tensor:
    """Keep the weights of the extra keys that dropout drops, and do not scale them."""
    kept = np.array(p.kept)
    kept[..., -p.extra_columns :] = 1
    return right(replace(p, kept=kept), weights)


def without_zero(right: Callable, p: TensorProblem, scores: Tensor) -> Tensor:
    return torch.cat([scores[..., :-1], torch.full_like(scores[..., -1:], -torch.inf)], dim=-1)


def sinks(change: Callable[[TensorProblem, Tensor], Tensor]) -> Plants:
    """Change the sinks' scores (B, N, T, 1)."""
    return {"sinks": lambda right, p, scores: change(p, right(p, scores))}


def above_the_maximum(right: Callable, p: TensorProblem, scores: Tensor) -> Tensor:
    """Subtract the largest score only from the other scores, not from the sinks."""
    top = scores.detach().amax(-1, keepdim=True)
    return right(p, scores) + top.masked_fill(top.isneginf(), 0.0)


_LEARNED, _SINKS = claims.weight("bias_k"), claims.weight("sinks")
_EXTRA_ROW = ("gqa/extra_keys", "per_head")
_TORCH_ROW = ("torch_mha/extra_keys", "none")
_SINKS_ROW = ("gqa/sinks", "window")

EXTRA_KEY_BUGS: dict[str, ClaimedBug] = {
    "extra keys hidden by the mask": ClaimedBug(
        {"seen": hidden_by_the_mask},
        ("torch_mha/extra_keys", "padding"),
        claims.every(claims.extra_columns, lambda c, p, u: p.allowed is not None),
    ),
    "extra keys spared by dropout": ClaimedBug(
        {"dropped": spared},
        ("gqa/extra_keys_dropout", "dropout"),
        claims.every(claims.extra_columns, lambda c, p, u: p.kept is not None),
    ),
    "learned key not scaled": ClaimedBug(
        learned(lambda p, k, v: (k / scale(p), v)), _TORCH_ROW, _LEARNED
    ),
    "learned key and value swapped": ClaimedBug(
        learned(lambda p, k, v: (v, k)), _TORCH_ROW, _LEARNED
    ),
    "learned key rotated": ClaimedBug(
        learned(rotated), _EXTRA_ROW, claims.every(_LEARNED, claims.steps(Turn))
    ),
    "gradient stopped at the learned key": ClaimedBug(
        learned(lambda p, k, v: (k.detach(), v)), _EXTRA_ROW, _LEARNED
    ),
    "gradient stopped at the learned value": ClaimedBug(
        learned(lambda p, k, v: (k, v.detach())), _EXTRA_ROW, _LEARNED
    ),
    "zero key left out": ClaimedBug(
        {"seen": without_zero}, ("torch_mha/extra_keys_weights", "empty_row"), claims.zero_key
    ),
    "zeros projected to the zero key": ClaimedBug(
        in_place_of_zero(projected),
        _TORCH_ROW,
        claims.every(claims.zero_key, claims.weight("k.bias")),
    ),
    "sinks left out": ClaimedBug(
        sinks(lambda p, s: torch.full_like(s, -torch.inf)), ("gqa/sinks", "empty_row"), _SINKS
    ),
    "sinks scaled": ClaimedBug(sinks(lambda p, s: scale(p) * s), _SINKS_ROW, _SINKS),
    "sinks above the row's maximum": ClaimedBug({"sinks": above_the_maximum}, _SINKS_ROW, _SINKS),
    "sinks of other heads": ClaimedBug(sinks(lambda p, s: s.roll(1, dims=1)), _SINKS_ROW, _SINKS),
    "one sink for all heads": ClaimedBug(
        sinks(lambda p, s: s.mean(1, keepdim=True).expand_as(s)), _SINKS_ROW, _SINKS
    ),
    "gradient stopped at the sinks": ClaimedBug(sinks(lambda p, s: s.detach()), _SINKS_ROW, _SINKS),
}
