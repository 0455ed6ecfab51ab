"""Grouped-query attention: N query heads share K key/value heads, 1 ≤ K ≤ N.

K = N is multi-head attention, K = 1 multi-query attention (Ainslie et al. 2023,
arXiv:2305.13245). Letters: B batch, T and S query and key length, N and K query and
key/value heads, G = N // K, H head_dim, D embed_dim.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torch_ref.cache import KVCache
from torch_ref.checks import positive_int, probability, split_evenly
from torch_ref.rotary import DynamicNTK, Rotary, rotate


class GroupedQueryAttention(nn.Module):
    """Attention with num_heads query heads that share num_kv_heads key/value heads.

    Called as `(query, key=None, value=None, mask=None, *, is_causal, bias, positions,
    key_positions)` or `(query, cache=cache, lengths=None)`.

    query (B, T, D), key (B, S, kdim), value (B, S, vdim) -> (B, T, D); key defaults to query, value
    to key. mask: boolean, True = attend, rank 2 or 4, broadcasts to (B, N, T, S); is_causal: key j
    is visible to query i if j ≤ i; bias: floats added to the scores, broadcasts to (B, N, T, S).
    Order: scale·QKᵀ → softcap·tanh(·/softcap) → bias → mask → softmax → dropout → V. Query head n
    reads key/value head n // G. A row that may attend to nothing gives 0 and has no gradient.

    qk_norm: makes q_norm and k_norm, for example nn.RMSNorm; called as `qk_norm(head_dim)`. rotary:
    then rotates queries and keys by positions (T,) or (B, T) and key_positions (S,) or (B, S); the
    default is 0, 1, …, or the query's without a key; with a key give both or neither. add_bias_kv:
    learns a key and a value, `bias_k` and `bias_v` (1, 1, K·H), after the S; add_zero_attn: adds a
    key and a value of 0 after those; both as in torch.nn.MultiheadAttention: every query sees them,
    and each has a column of weights and dropout. sinks: learns a score `sinks` (N,) for each query
    head, which has no value and no column, as in gpt-oss. position_bias: an Alibi, a RelativeBias
    or another function `position_bias(T, S)` that returns floats to add to the scores. cache: a
    KVCache of the tokens before the query's. The query's tokens attend to all of them and,
    causally, to themselves, and are added to the cache; lengths (B,): how many of each row's T
    tokens are real.

    Written for this package as a superset of the published designs, so there are no departures.
    Raises ValueError that names the argument.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        dropout: float = 0.0,
        out_dropout: float = 0.0,
        scale: float | None = None,
        softcap: float | None = None,
        qk_norm: Callable[[int], nn.Module] | None = None,
        rotary: Rotary | None = None,
        position_bias: Callable[[int, int], Tensor] | None = None,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        sinks: bool = False,
    ):
        super().__init__()
        split_evenly("num_heads", num_heads, "num_kv_heads", num_kv_heads)
        if head_dim is None:
            head_dim = split_evenly("embed_dim", embed_dim, "num_heads", num_heads)
        if softcap is not None and not softcap > 0:
            raise ValueError(f"softcap: expected a number above 0, or None, got {softcap!r}")
        self.embed_dim = positive_int("embed_dim", embed_dim)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = positive_int("head_dim", head_dim)
        self.kdim = embed_dim if kdim is None else positive_int("kdim", kdim)
        self.vdim = embed_dim if vdim is None else positive_int("vdim", vdim)
        self.scale = 1 / math.sqrt(head_dim) if scale is None else scale
        self.softcap, self.rotary, self.position_bias = softcap, rotary, position_bias
        if rotary is not None:
            rotary.check(head_dim)
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(self.kdim, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(self.vdim, num_kv_heads * head_dim, bias=bias)
        out_bias = bias if out_bias is None else out_bias
        self.out_proj = nn.Linear(num_heads * head_dim, embed_dim, bias=out_bias)
        self.q_norm = nn.Identity() if qk_norm is None else qk_norm(head_dim)
        self.k_norm = nn.Identity() if qk_norm is None else qk_norm(head_dim)
        self.add_zero_attn = add_zero_attn
        shape, deviation = (1, 1, num_kv_heads * head_dim), (num_kv_heads * head_dim) ** -0.5
        self.bias_k = _normal(shape, deviation) if add_bias_kv else None
        self.bias_v = _normal(shape, deviation) if add_bias_kv else None
        self.sinks = _normal((num_heads,), 0.02) if sinks else None
        self.dropout = nn.Dropout(probability("dropout", dropout))
        self.out_dropout = nn.Dropout(probability("out_dropout", out_dropout))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        bias: Tensor | None = None,
        positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        cache: KVCache | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        where = {"positions": positions, "key_positions": key_positions}
        if cache is not None:
            others = {"key": key, "value": value, "mask": mask, "bias": bias, **where}
            if present := [name for name, x in others.items() if x is not None]:
                raise ValueError(f"{present[0]}: expected None with a cache")
            return self._continued(query, cache, lengths)
        if lengths is not None:
            raise ValueError("lengths: expected None without a cache")
        weights_BNTS = self.attention_weights(
            query, key, mask, is_causal=is_causal, bias=bias, **where
        )
        key = query if key is None else key
        value = key if value is None else value
        _check_sequence("value", value, self.vdim, query.shape[0], key.shape[1])
        return self._output(weights_BNTS, self._values(value))

    def attention_weights(
        self,
        query: Tensor,
        key: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        bias: Tensor | None = None,
        positions: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> Tensor:
        """Return the softmax before dropout, (B, N, T, S), then columns for extra keys."""
        self._check_positions(key, positions, key_positions)
        key_positions = positions if key is None else key_positions
        key = query if key is None else key
        _check_sequence("query", query, self.embed_dim)
        _check_sequence("key", key, self.kdim, query.shape[0])
        BNTS = (query.shape[0], self.num_heads, query.shape[1], key.shape[1])
        _check_over_scores("mask", mask, BNTS)
        _check_over_scores("bias", bias, BNTS)
        if self.position_bias is not None:
            own_NTS = self.position_bias(*BNTS[2:])
            bias = own_NTS if bias is None else bias + own_NTS
        if is_causal:
            causal_TS = torch.ones(BNTS[2:], dtype=torch.bool, device=query.device).tril()
            mask = causal_TS if mask is None else mask & causal_TS
        return self._weights(*self._heads(query, key, positions, key_positions), mask, bias)

    def _continued(self, query: Tensor, cache: KVCache, lengths: Tensor | None) -> Tensor:
        """Return the output for the tokens after those in the cache, and extend the cache."""
        if not isinstance(cache, KVCache):
            raise ValueError(f"cache: expected a KVCache, got {type(cache).__name__}")
        if self.training and (self.dropout.p > 0 or self.out_dropout.p > 0):
            raise ValueError("cache: expected no dropout: call eval() first")
        for width in (self.embed_dim, self.kdim, self.vdim):
            _check_sequence("query", query, width)
        if self.rotary is not None and isinstance(self.rotary.scaling, DynamicNTK):
            raise ValueError(
                "cache: cannot be combined with DynamicNTK, which depends on the length"
            )
        if self.position_bias is not None:
            raise ValueError("cache: expected a module without position_bias")
        B, T, _ = query.shape
        if lengths is None:
            lengths = torch.full((B,), T, device=query.device)
        positions_BT = cache.positions(T)
        q_BTNH, k_BTKH = self._heads(query, query, positions_BT, positions_BT)
        v_BTKH = self._values(query)
        cache.check(k_BTKH, v_BTKH, lengths)
        k_BSKH = torch.cat((cache.keys.to(k_BTKH.dtype), k_BTKH), dim=1)
        v_BSKH = torch.cat((cache.values.to(v_BTKH.dtype), v_BTKH), dim=1)
        weights_BNTS = self._weights(q_BTNH, k_BSKH, cache.visible(T), None)
        cache.append(k_BTKH, v_BTKH, lengths)
        return self._output(weights_BNTS, v_BSKH)

    def _check_positions(
        self, key: Tensor | None, positions: Tensor | None, key_positions: Tensor | None
    ) -> None:
        where = {"positions": positions, "key_positions": key_positions}
        present = [name for name, at in where.items() if at is not None]
        if self.rotary is None and present:
            raise ValueError(f"{present[0]}: expected None, because the module has no rotary")
        if key is None and key_positions is not None:
            raise ValueError("key_positions: expected None without a key")
        if key is not None and len(present) == 1:
            both = "expected positions and key_positions, because a key is given"
            raise ValueError(f"{present[0]}: {both}")

    def _heads(
        self, query: Tensor, key: Tensor, positions: Tensor | None, key_positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return queries (B, T, N, H) and keys (B, S, K, H): projected, normalised, rotated."""
        q_BTNH = self.q_norm(self.q_proj(query).unflatten(-1, (self.num_heads, self.head_dim)))
        k_BSKH = self.k_norm(self.k_proj(key).unflatten(-1, (self.num_kv_heads, self.head_dim)))
        if self.rotary is None:
            return q_BTNH, k_BSKH
        length = max(_length(positions, q_BTNH), _length(key_positions, k_BSKH))
        q_BTNH = rotate(q_BTNH, positions, self.rotary, length=length)
        return q_BTNH, rotate(k_BSKH, key_positions, self.rotary, length=length)

    def _values(self, value: Tensor) -> Tensor:
        return self.v_proj(value).unflatten(-1, (self.num_kv_heads, self.head_dim))

    def _weights(
        self, q_BTNH: Tensor, k_BSKH: Tensor, mask: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        q_BTKGH = q_BTNH.unflatten(2, (self.num_kv_heads, -1))
        scores = self.scale * torch.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH).flatten(1, 2)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if bias is not None:
            scores = scores + bias
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        scores = torch.cat((scores, *self._extra_scores(q_BTKGH)), dim=-1)
        # The softmax of a row of -inf is NaN, and NaN times 0 stays NaN in the backward pass: such
        # rows get finite scores first, and weights of 0 afterwards.
        empty_BNT1 = (scores == float("-inf")).all(dim=-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(empty_BNT1, 0.0), dim=-1)
        weights = weights.masked_fill(empty_BNT1, 0.0)
        return weights if self.sinks is None else weights[..., :-1]

    def _extra_scores(self, q_BTKGH: Tensor) -> list[Tensor]:
        """Return scores (B, N, T, 1) of bias_k, of the zero key and of the sinks, those present."""
        (B, T, K, G, _), columns = q_BTKGH.shape, []
        if self.bias_k is not None:
            k_KH = self.bias_k.view(K, self.head_dim)
            scores = self.scale * torch.einsum("btkgh,kh->bkgt", q_BTKGH, k_KH).flatten(1, 2)
            if self.softcap is not None:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            columns.append(scores[..., None])
        if self.add_zero_attn:
            columns.append(q_BTKGH.new_zeros(B, K * G, T, 1))
        if self.sinks is not None:
            columns.append(self.sinks.view(1, -1, 1, 1).expand(B, -1, T, 1).to(q_BTKGH.dtype))
        return columns

    def _output(self, weights_BNTS: Tensor, v_BSKH: Tensor) -> Tensor:
        B, _, K, H = v_BSKH.shape
        if self.bias_v is not None:
            bias_v_B1KH = self.bias_v.view(1, 1, K, H).expand(B, -1, -1, -1)
            v_BSKH = torch.cat((v_BSKH, bias_v_B1KH.to(v_BSKH.dtype)), dim=1)
        if self.add_zero_attn:
            v_BSKH = torch.cat((v_BSKH, v_BSKH.new_zeros(B, 1, K, H)), dim=1)
        weights_BKGTS = self.dropout(weights_BNTS).unflatten(1, (self.num_kv_heads, -1))
        heads_BTKGH = torch.einsum("bkgts,bskh->btkgh", weights_BKGTS.to(v_BSKH.dtype), v_BSKH)
        return self.out_dropout(self.out_proj(heads_BTKGH.flatten(2)))


def _normal(shape: tuple[int, ...], deviation: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * deviation)


def _length(positions: Tensor | None, x_BTNH: Tensor) -> int:
    return x_BTNH.shape[1] if positions is None else int(positions.max()) + 1


def _check_sequence(
    name: str, x: Tensor, width: int, batch: int | None = None, length: int | None = None
) -> None:
    """Check rank 3, a length ≥ 1, the width, and batch and length if they are given."""
    wanted = ("batch" if batch is None else batch, "length" if length is None else length, width)
    fits = x.ndim == 3 and x.shape[1] > 0
    if not fits or any(
        w not in (n, "batch", "length") for w, n in zip(wanted, x.shape, strict=True)
    ):
        expected = ", ".join(map(str, wanted))
        raise ValueError(f"{name}: expected ({expected}), length above 0, got {tuple(x.shape)}")


def _check_over_scores(name: str, x: Tensor | None, BNTS: tuple[int, int, int, int]) -> None:
    """Check that a mask is boolean, of rank 2 or 4, a bias floating; both broadcast to BNTS."""
    if x is None:
        return
    if name == "mask" and x.dtype != torch.bool:
        raise ValueError(f"mask: expected a boolean tensor, True = attend, got {x.dtype}")
    if name == "mask" and x.ndim not in (2, 4):
        raise ValueError(
            f"mask: expected (T, S) or (B, N, T, S), got rank {x.ndim} {tuple(x.shape)}; "
            "rank 3 could mean (B, T, S) or (N, T, S): write mask[:, None] or mask[None]"
        )
    if name == "bias" and not x.is_floating_point():
        raise ValueError(f"bias: expected a floating tensor, added to the scores, got {x.dtype}")
    pairs = zip(x.shape[::-1], BNTS[::-1], strict=False)
    if x.ndim > 4 or any(have not in (1, want) for have, want in pairs):
        shape = tuple(x.shape)
        raise ValueError(f"{name}: expected a shape that broadcasts to {BNTS}, got {shape}")
