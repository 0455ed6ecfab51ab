"""Multi-head self-attention with one projection for queries, keys and values."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from torch_ref.checks import split_evenly


class MultiHeadSelfAttention(nn.Module):
    """`(x) -> output`; parameters `qkv_proj out_proj`; no mask.

    x and output (B, T, D). `qkv_proj` gives (B, T, 3·D), read as (B, T, 3, N, H): all
    heads of Q, then all of K, then all of V.

    Departures from the published code:
      * sizes that do not fit raise ValueError, not AssertionError.
      * the demonstration, printed at import, is left out.
    """

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        self.head_dim = split_evenly("embed_dim", embed_dim, "num_heads", num_heads)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.qkv_proj = nn.Linear(embed_dim, embed_dim * 3)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.size()
        qkv = self.qkv_proj(x).reshape(B, T, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.transpose(-2, -1)) / self.head_dim**0.5
        heads = torch.matmul(F.softmax(scores, dim=-1), v)
        return self.out_proj(heads.transpose(1, 2).reshape(B, T, D))
