"""What is added to the scores by where query and key are; names as in jax_attn.

ALiBi: Press et al. 2022, arXiv:2108.12409. T5's buckets: Raffel et al. 2020, arXiv:1910.10683.
"""

import math
from dataclasses import dataclass

import torch

from torch_ref.checks import positive_int


@dataclass(frozen=True)
class Alibi:
    """ALiBi of num_heads heads, its slopes multiplied by factor: called as (T, S) -> (N, 1, S)."""

    num_heads: int
    factor: float = 1.0

    def __post_init__(self):
        positive_int("num_heads", self.num_heads)
        if not self.factor > 0:
            raise ValueError(f"factor: expected a number above 0, got {self.factor!r}")

    def __call__(self, T: int, S: int) -> torch.Tensor:
        return alibi(self.num_heads, S, factor=self.factor)


def alibi(num_heads: int, length: int, *, factor: float = 1.0) -> torch.Tensor:
    """factor · slope · (j − (S − 1)) for head n and key j of S = length; (N, 1, S) in float32.

    A query at i wants j − i in place of j − (S − 1): one number for all its keys, which no softmax
    sees. For causal attention.
    """
    distance_S = torch.arange(length, dtype=torch.float32) - (length - 1)
    return factor * alibi_slopes(num_heads)[:, None, None] * distance_S


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """2^(−8n/N) for head n = 1 … N where N is a power of two; (N,).

    Else those of the largest power of two below it, then every other one of twice as many.
    """
    most = 2 ** int(math.log2(num_heads))

    def geometric(count):
        return torch.exp2(-8 / count * torch.arange(1, count + 1, dtype=torch.float32))

    return torch.cat([geometric(most), geometric(2 * most)[::2][: num_heads - most]])
