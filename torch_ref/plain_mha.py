"""Multi-head self-attention without a mask, and the sentence pipeline around it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torch_ref.checks import split_evenly

WORD_TO_INDEX = {"this": 1, "is": 2, "an": 3, "example": 4, "sentence": 5}


class MultiHeadAttention(nn.Module):
    """`(X) -> output`; parameters `query key value out`; no mask.

    X and output (B, T, D).

    Departures from the published code:
      * it prints shapes as it goes: this one is silent.
      * it takes `embed_dim // num_heads` unchecked and fails later, in a view: here an
        embed_dim that the heads do not divide raises ValueError at once.
    """

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        self.head_dim = split_evenly("embed_dim", embed_dim, "num_heads", num_heads)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.query = nn.Linear(embed_dim, embed_dim)
        self.key = nn.Linear(embed_dim, embed_dim)
        self.value = nn.Linear(embed_dim, embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, X: Tensor) -> Tensor:
        B, T, D = X.size()
        q = self.query(X).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.key(X).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.value(X).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-2, -1)) / self.head_dim**0.5
        weights = torch.nn.functional.softmax(scores, dim=-1)
        heads = torch.matmul(weights, v)
        return self.out(heads.transpose(1, 2).contiguous().view(B, T, D))


def simple_tokenizer(sentence: str) -> list[int]:
    """Return each word's index, split at white space, ignoring case; 0 for an unknown word."""
    return [WORD_TO_INDEX.get(word, 0) for word in sentence.lower().split()]


def encode_sentence(
    sentence: str, tokenizer: Callable[[str], list[int]], max_len: int = 10
) -> Tensor:
    """Return token ids (max_len,) of dtype long, truncated or padded with 0."""
    tokens = tokenizer(sentence)[:max_len]
    return torch.tensor(tokens + [0] * (max_len - len(tokens)), dtype=torch.long)


class SentenceAttention(nn.Module):
    """The published script as a module: token ids (B, T) -> embedding -> attention (B, T, D).

    The ids come from `encode_sentence`, with a batch axis in front; `vocab_size` counts the 0.
    Sub-modules `embedding` and `attention`.

    Departures from the published code:
      * a script of globals there, a module here.

    As published, the padding 0 is attended to like a word.
    """

    def __init__(self, vocab_size: int, embed_dim: int, num_heads: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embed_dim)
        self.attention = MultiHeadAttention(embed_dim, num_heads)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.attention(self.embedding(token_ids))
