"""Biases computed from the positions of query and key; names as in jax_attn.

ALiBi: Press et al. 2022, arXiv:2108.12409. T5's buckets: Raffel et al. 2020, arXiv:1910.10683.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_ref.checks import positive_int


@dataclass(frozen=True)
class Alibi:
    """ALiBi for num_heads heads, slopes multiplied by factor; call it as (T, S) -> (N, 1, S)."""

    num_heads: int
    factor: float = 1.0

    def __post_init__(self) -> None:
        positive_int("num_heads", self.num_heads)
        if not self.factor > 0:
            raise ValueError(f"factor: expected a number above 0, got {self.factor!r}")

    def __call__(self, T: int, S: int) -> Tensor:
        return alibi(self.num_heads, S, factor=self.factor)


def alibi(num_heads: int, length: int, *, factor: float = 1.0) -> Tensor:
    """Return factor · slope · (j − (S − 1)) for head n and key j, S = length: (N, 1, S) float32.

    The definition has j − i for a query at i. The difference is the same for all its keys and
    cancels in the softmax. For causal attention.
    """
    distance_S = torch.arange(length, dtype=torch.float32) - (length - 1)
    return factor * alibi_slopes(num_heads)[:, None, None] * distance_S


class RelativeBias(torch.nn.Embedding):
    """T5's learned bias, (T, S) -> (N, T, S): for each head one number for the bucket of j − i.

    weight (buckets, N), drawn from N(0, 1). The other arguments are those of `relative_bucket`.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
    ):
        super().__init__(positive_int("buckets", buckets), positive_int("num_heads", num_heads))
        self.max_distance, self.bidirectional = max_distance, bidirectional

    # Called with lengths, like every position bias, not with tokens.
    def forward(self, T: int, S: int) -> Tensor:  # type: ignore[override]
        how = (self.num_embeddings, self.max_distance, self.bidirectional)
        device = self.weight.device
        bucket_R = torch.tensor([relative_bucket(d, *how) for d in range(1 - T, S)], device=device)
        i, j = torch.arange(T, device=device)[:, None], torch.arange(S, device=device)[None]
        return super().forward(bucket_R[j - i + T - 1]).permute(2, 0, 1)


def relative_bucket(
    distance: int, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
) -> int:
    """Return T5's bucket for a distance j − i of key from query.

    The nearer half of the buckets hold one distance each, the others grow evenly on a logarithmic
    scale up to max_distance, and the last holds all larger ones. bidirectional: keys after the
    query have the second half for themselves; otherwise they share the bucket of distance 0.
    """
    count = buckets // 2 if bidirectional else buckets
    first = count if bidirectional and distance > 0 else 0
    away = abs(distance) if bidirectional else max(-distance, 0)
    near = count // 2
    if away < near:
        return first + away
    steps = math.log(away / near) / math.log(max_distance / near) * (count - near)
    return first + min(near + int(steps), count - 1)


def alibi_slopes(num_heads: int) -> Tensor:
    """Return the slope of each head, (N,): 2^(−8n/N), n = 1 … N, if N is a power of two.

    Otherwise return the slopes of the largest power of two below N, then every other slope of twice
    that power.
    """
    most = 2 ** int(math.log2(num_heads))

    def geometric(count: int) -> Tensor:
        return torch.exp2(-8 / count * torch.arange(1, count + 1, dtype=torch.float32))

    return torch.cat([geometric(most), geometric(2 * most)[::2][: num_heads - most]])
