"""Multi-head self-attention that returns its weights, with dropout on the output."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from torch_ref.checks import probability, split_evenly


class MultiHeadSelfAttention(nn.Module):
    """`(x, mask=None) -> (output, attention weights)`; parameters `w_q w_k w_v w_o`.

    x (B, T, D); mask (B, T, T) of 0/1, 1 = attend, the same for every head; output (B, T, D);
    weights (B, N, T, T). Dropout applies to the output, after `w_o`, never to the weights. As
    published, √d_k is computed in x's own dtype, so in bfloat16 every score has the rounding error
    of √d_k, up to a relative 2⁻⁹.

    Departures from the published code:
      * `scaled_dot_product_attention` there lacks `self`, so that the call fails: here
        it has it.
      * `mask` there is accepted and ignored: here 0 forbids, for all heads. A row of zeros
        gives NaN in output and weights, because every score is -inf.
      * sizes that do not fit raise ValueError, not AssertionError; the message is English.
    """

    def __init__(self, d_model: int, num_heads: int, dropout: float = 0.1):
        super().__init__()
        self.d_k = split_evenly("d_model", d_model, "num_heads", num_heads)
        self.d_model, self.num_heads = d_model, num_heads
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(probability("dropout", dropout))

    def scaled_dot_product_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map q, k, v (B, N, T, H), mask (B, T, T) to output (B, N, T, H), weights (B, N, T, T)."""
        d_k = torch.tensor(q.size(-1), dtype=q.dtype)
        scores = torch.matmul(q, k.transpose(-2, -1)) / torch.sqrt(d_k)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None] == 0, float("-inf"))
        weights = F.softmax(scores, dim=-1)
        return torch.matmul(weights, v), weights

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        B, T, _ = x.size()
        if mask is not None and mask.shape != (B, T, T):
            raise ValueError(f"mask: expected shape {(B, T, T)}, got {tuple(mask.shape)}")
        q = self.w_q(x).view(B, T, self.num_heads, self.d_k).transpose(1, 2)
        k = self.w_k(x).view(B, T, self.num_heads, self.d_k).transpose(1, 2)
        v = self.w_v(x).view(B, T, self.num_heads, self.d_k).transpose(1, 2)
        heads, weights = self.scaled_dot_product_attention(q, k, v, mask)
        joined = heads.transpose(1, 2).contiguous().view(B, T, self.d_model)
        return self.dropout(self.w_o(joined)), weights
