"""How each side is called where it reads a text in pieces, through its cache.

Read so, it gives what it gives read at once: the oracle knows nothing of a cache. Two ways: a
prompt, and the rest token by token; or ragged, in chunks in which each row reads as many tokens
as it likes, so that rows stand at different places and what is short is padded. The port reads
tokens, and chunks, in a `jax.lax.scan`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_attn.attention import KVCache, Mask
from jax_attn.attention.kv_cache import PageSizes
from jax_attn.parity.matrix.masks import WINDOW
from jax_attn.parity.matrix.shapes import first_piece
from torch_ref import cache as torch_cache

# How many tokens the rows read, chunk by chunk, each row from another place in the list on.
_PACE = (3, 1, 0, 2)
# So small that rows have several pages, and several tokens are written by the page.
_PAGES = PageSizes(first=5, few_tokens=1, query_tile=2)


def _room(kind: str, T: int) -> dict[str, int]:
    """How large a cache is: a ring, where tokens see a sliding window."""
    return {"window": WINDOW[0] + 1} if kind == "sliding" else {"length": T}


def torch_pieces(kind: str):
    def call(module, x):
        T = x.shape[1]
        cache = _torch_cache(kind, module, x)
        first = first_piece(T)
        pieces = (slice(0, first), *(slice(t, t + 1) for t in range(first, T)))
        return {"output": torch.cat([module(x[:, piece], cache=cache) for piece in pieces], dim=1)}

    return call


def port_pieces(kind: str):
    def call(module, x):
        n = first_piece(x.shape[1])
        first, cache = module(x[:, :n], cache=_port_cache(kind, module, x))

        def step(cache, x_BD):
            out, cache = module(x_BD[:, None], cache=cache)
            return cache, out[:, 0]

        _, rest_TBD = jax.lax.scan(step, cache, x[:, n:].swapaxes(0, 1))
        return {"output": jnp.concatenate([first, rest_TBD.swapaxes(0, 1)], axis=1)}

    return call


def _chunks(B: int, T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of chunks until every row has read T tokens.

    lengths (chunks, B): how many tokens each row reads. given (chunks, B, width): which it is
    given; behind those that count come some that do not. where (B, T): where each token's output
    lies in those of all chunks, one after the other.
    """
    width, read = max(_PACE), np.zeros(B, int)
    lengths, given, where_BT = [], [], np.zeros((B, T), int)
    while read.min() < T:
        now = np.array([_PACE[(len(lengths) + b) % len(_PACE)] for b in range(B)])
        now = np.minimum(now, T - read)
        own = read[:, None] + np.arange(width)
        given.append(np.where(np.arange(width) < now[:, None], own, 0))
        for b, n in enumerate(now):
            where_BT[b, read[b] : read[b] + n] = len(lengths) * width + np.arange(n)
        lengths.append(now)
        read = read + now
    return np.array(lengths, np.int32), np.array(given), where_BT


def torch_ragged(kind: str):
    def call(module, x):
        cache = _torch_cache(kind, module, x)
        lengths, given, where_BT = _chunks(*x.shape[:2])
        outs = [
            module(_torch_take(x, index), cache=cache, lengths=torch.from_numpy(now))
            for now, index in zip(lengths, given, strict=True)
        ]
        return {"output": _torch_take(torch.cat(outs, dim=1), where_BT)}

    return call


def port_ragged(kind: str):
    def call(module, x):
        B, T, D = x.shape
        lengths, given, where_BT = _chunks(B, T)

        def step(cache, chunk):
            x_BTD, lengths = chunk
            out, cache = module(x_BTD, mask=Mask.lengths(lengths), cache=cache)
            return cache, out

        chunks = jnp.stack([_take(x, index) for index in given]), jnp.asarray(lengths)
        _, outs = jax.lax.scan(step, _port_cache(kind, module, x), chunks)
        return {"output": _take(outs.swapaxes(0, 1).reshape(B, -1, D), where_BT)}

    return call


def _take(x_BTD: jax.Array, index_BT: np.ndarray) -> jax.Array:
    return jnp.take_along_axis(x_BTD, index_BT[..., None], axis=1)


def _torch_cache(kind: str, module, x: torch.Tensor) -> torch_cache.KVCache:
    heads = {"num_kv_heads": module.num_kv_heads, "head_dim": module.head_dim, "dtype": x.dtype}
    return torch_cache.KVCache(x.shape[0], **_room(kind, x.shape[1]), **heads)


def _port_cache(kind: str, module, x: jax.Array) -> KVCache:
    heads = {"num_kv_heads": module.num_kv_heads, "head_dim": module.head_dim, "dtype": x.dtype}
    return KVCache.empty(x.shape[0], **_room(kind, x.shape[1]), **heads, page_sizes=_PAGES)


def _torch_take(x_BTD: torch.Tensor, index_BT: np.ndarray) -> torch.Tensor:
    index = torch.from_numpy(index_BT)[..., None].expand(-1, -1, x_BTD.shape[2])
    return x_BTD.gather(1, index)
