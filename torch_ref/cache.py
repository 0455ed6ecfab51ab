"""Cached keys and values of earlier tokens, in torch: the counterpart of ``jax_attn.nn.KVCache``.

Written for readability: every step reads every place, and each place knows its token.
"""

import torch
from torch import Tensor

from torch_ref.checks import positive_int


class KVCache:
    """Keys and values that ``GroupedQueryAttention`` attends to and extends in place.

    length: the most tokens that a row can hold, token n in place n; or window: how many tokens a
    token sees, including itself, token n in place n % window of a ring.

    keys, values (B, P, K, H): P places a row. filled (B,): the number of tokens each row has read.
    Gradients flow through earlier tokens, so decode under torch.no_grad() if none are needed.
    Raises ValueError that names the argument.
    """

    def __init__(
        self,
        batch: int,
        length: int | None = None,
        *,
        num_kv_heads: int,
        head_dim: int,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ):
        if (length is None) == (window is None):
            raise ValueError(f"length, window: expected one of them, got {length} and {window}")
        name, places = ("length", length) if window is None else ("window", window)
        sizes = {"batch": batch, name: places, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        shape = [positive_int(name, size) for name, size in sizes.items()]
        if not dtype.is_floating_point:
            raise ValueError(f"dtype: expected a floating dtype, got {dtype}")
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.filled = torch.zeros(batch, dtype=torch.long, device=device)
        self.window = window

    def positions(self, T: int) -> Tensor:
        """Return the positions of the next T tokens, (B, T)."""
        return self.filled[:, None] + torch.arange(T, device=self.filled.device)

    def tokens(self) -> Tensor:
        """Return which token each place holds, (B, P); below 0 for an empty place."""
        place_P = torch.arange(self.keys.shape[1], device=self.filled.device)
        last_B1 = self.filled[:, None] - 1
        if self.window is None:
            return torch.where(place_P <= last_B1, place_P, -1)
        return last_B1 - (last_B1 - place_P) % self.window

    def visible(self, T: int) -> Tensor:
        """Return which places and next T tokens each of these tokens sees, (B, 1, T, P + T)."""
        query_BT1 = self.positions(T)[..., None]
        token_B1S = torch.cat((self.tokens(), self.positions(T)), dim=1)[:, None]
        visible_BTS = (token_B1S >= 0) & (token_B1S <= query_BT1)
        if self.window is not None:
            visible_BTS &= token_B1S > query_BT1 - self.window
        return visible_BTS[:, None]

    def check(self, k_BTKH: Tensor, v_BTKH: Tensor, lengths: Tensor) -> None:
        """Raise ValueError if these do not fit, before anything is written."""
        B, P, K, H = self.keys.shape
        called = (k_BTKH.shape[0], *k_BTKH.shape[2:])
        if called != (B, K, H):
            raise ValueError(f"cache: expected B, K, H = {called} as in the call, got {(B, K, H)}")
        T = k_BTKH.shape[1]
        counts = isinstance(lengths, Tensor) and lengths.dtype in (torch.int32, torch.int64)
        if not counts or lengths.shape != (B,) or bool(((lengths < 0) | (lengths > T)).any()):
            raise ValueError(f"lengths: expected {B} integers of 0 to {T}, a tensor; got {lengths}")
        most = int((self.filled + lengths).max())
        if self.window is None and most > P:
            raise ValueError(f"cache: expected at most {P} tokens a row, got {most}")

    def append(self, k_BTKH: Tensor, v_BTKH: Tensor, lengths: Tensor) -> None:
        """Write the first `lengths` (B,) of these tokens; a ring keeps the last of them."""
        self.check(k_BTKH, v_BTKH, lengths)
        token_BT = self.positions(k_BTKH.shape[1])
        filled_B1 = (self.filled + lengths)[:, None]
        kept_BT = token_BT < filled_B1
        if self.window is not None:
            kept_BT &= token_BT >= filled_B1 - self.window
            token_BT = token_BT % self.window
        b, t = kept_BT.nonzero(as_tuple=True)
        places = b, token_BT[b, t]
        self.keys[places] = k_BTKH[b, t].to(self.keys.dtype)
        self.values[places] = v_BTKH[b, t].to(self.values.dtype)
        self.filled = self.filled + lengths
