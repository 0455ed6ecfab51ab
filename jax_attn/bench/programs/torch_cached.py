"""PyTorch's ways to read tokens into a cache. Builders: (workload, tensors) -> `Program`.

Keys and values are laid out as torch's fused attention takes them, (B, K, room, H). A call writes
its tokens in place behind those already there, and attends to a view of the filled part.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from jax_attn.bench.programs.program import Program
from jax_attn.bench.programs.torch_programs import EAGER, Tensors, sdpa_kernel_name
from jax_attn.bench.workload import Workload


def sdpa(workload: Workload, tensors: Tensors) -> Program:
    w, cache = workload, _Cache(workload, tensors)
    masked = _masked(w, tensors["query"].device)
    kernel = sdpa_kernel_name(w, tensors["query"], **masked)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        k_BKSH, v_BKSH = cache.grown(key, value)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2), k_BKSH, v_BKSH, enable_gqa=w.K != w.N, **masked
        )
        return attended.transpose(1, 2)

    writes_scores = kernel.endswith("math")
    return Program(call, {}, kernel=kernel, writes_scores=writes_scores, cache_bytes=cache.nbytes)


def eager(workload: Workload, tensors: Tensors) -> Program:
    """As published: scores, a mask of -inf, softmax, product."""
    w, cache = workload, _Cache(workload, tensors)
    visible = _visible(w, tensors["query"].device)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        k_BKSH, v_BKSH = cache.grown(key, value)
        # A group's queries are rows of one product: no key or value is repeated for them.
        q_BKGTH = query.unflatten(2, (w.K, -1)).permute(0, 2, 3, 1, 4)
        scores_BKGTS = (q_BKGTH.flatten(2, 3) @ k_BKSH.mT).unflatten(2, (-1, w.T))
        scores_BKGTS = scores_BKGTS / math.sqrt(w.H)
        if w.T > 1:
            scores_BKGTS = scores_BKGTS.masked_fill(~visible, float("-inf"))
        weights_BKGTS = F.softmax(scores_BKGTS, dim=-1)
        heads_BKGTH = (weights_BKGTS.flatten(2, 3) @ v_BKSH).unflatten(2, (-1, w.T))
        return heads_BKGTH.permute(0, 3, 1, 2, 4).flatten(2, 3)

    return Program(call, {}, kernel=EAGER, cache_bytes=cache.nbytes)


class _Cache:
    """The keys and values read before, and room for more."""

    def __init__(self, workload: Workload, tensors: Tensors) -> None:
        w = self.workload = workload
        shape = (w.B, w.K, w.room, w.H)
        self.keys, self.values = (tensors["key"].new_zeros(shape) for _ in range(2))
        self.keys[:, :, : w.filled] = tensors["past_key"].transpose(1, 2)
        self.values[:, :, : w.filled] = tensors["past_value"].transpose(1, 2)

    def grown(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write key and value (B, T, K, H); returns views (B, K, S, H) of all that are filled."""
        w = self.workload
        self.keys[:, :, w.filled : w.S] = key.transpose(1, 2)
        self.values[:, :, w.filled : w.S] = value.transpose(1, 2)
        return self.keys[:, :, : w.S], self.values[:, :, : w.S]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def _masked(w: Workload, device: torch.device) -> dict[str, Any]:
    """The mask arguments of torch's fused attention, whose own causal corner is top-left."""
    if w.T == 1:
        return {}
    return {"attn_mask": _visible(w, device)} if w.filled else {"is_causal": True}


def _visible(w: Workload, device: torch.device) -> Tensor:
    """(T, S): each token sees all up to and including itself."""
    return torch.ones(w.T, w.S, dtype=torch.bool, device=device).tril_(w.filled)
