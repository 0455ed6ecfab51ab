"""Multi-query self-attention: every query head reads the one key/value head."""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from torch_ref.checks import split_evenly


class MultiQueryAttention(nn.Module):
    """`(x, mask=None) -> output`; parameters `W_Q W_K W_V W_O`, `W_K` and `W_V` to head_dim.

    x and output (B, T, D); mask of 0/1, 1 = attend, anything that broadcasts to
    (B, N, T, T), so that rank 3 reads as (N, T, T). A row of zeros gives NaN, as published.

    Departures from the published code:
      * `.contiguous` there lacks its parentheses, so that the call fails: here it has them.
      * `self.n_model` there is never set: here it is `self.d_model`.
      * sizes that do not fit raise ValueError, not AssertionError.
    """

    def __init__(self, d_model: int, num_heads: int):
        super().__init__()
        self.d_k = split_evenly("d_model", d_model, "num_heads", num_heads)
        self.d_model, self.num_heads = d_model, num_heads
        self.W_Q = nn.Linear(d_model, d_model)
        self.W_K = nn.Linear(d_model, self.d_k)
        self.W_V = nn.Linear(d_model, self.d_k)
        self.W_O = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, T, _ = x.size()
        Q = self.W_Q(x).view(B, T, self.num_heads, self.d_k).transpose(1, 2)
        K = self.W_K(x).view(B, T, 1, self.d_k).transpose(1, 2)
        V = self.W_V(x).view(B, T, 1, self.d_k).transpose(1, 2)
        scores = torch.matmul(Q, K.transpose(-1, -2)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        heads = torch.matmul(F.softmax(scores, dim=-1), V)
        return self.W_O(heads.transpose(1, 2).contiguous().view(B, T, self.d_model))
