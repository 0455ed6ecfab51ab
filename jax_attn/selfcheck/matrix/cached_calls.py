"""Call each side so that it reads a text in pieces, through its cache.

The result must equal that of reading at once: the oracle has no cache. There are two ways: a prompt
and then the rest in pieces, token by token if the text is short; or ragged chunks, in each of which
every row reads its own number of tokens, so that rows are at different positions and short ones are
padded. The port reads pieces of one length, and chunks, in a `jax.lax.scan`.
"""

import math
from collections.abc import Callable
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_attn.attention import KVCache, Mask, meshes
from jax_attn.attention.kv_cache import PageSizes
from jax_attn.nn import GroupedQueryAttention
from jax_attn.selfcheck.matrix.masks import WINDOW
from torch_ref import cache as torch_cache
from torch_ref.gqa import GroupedQueryAttention as TorchAttention

TorchCall = Callable[..., dict[str, torch.Tensor]]
PortCall = Callable[..., dict[str, jax.Array]]

# The numbers of tokens that a row reads, chunk by chunk; each row starts elsewhere in the list.
_PACE = (3, 1, 0, 2)
SHIPPED_PAGES = PageSizes()
# Small enough that a text of 13 tokens has two pages, and several tokens are written page by page.
# A text of 8 has one, whose program compiles in two thirds of the time.
SMALL_PAGES = PageSizes(first=8, few_tokens=1, query_tile=2)


def page_sizes(T: int) -> PageSizes:
    """Return the shipped pages for a text longer than one of them, else small ones."""
    return SHIPPED_PAGES if SHIPPED_PAGES.first < T else SMALL_PAGES


def pages_in_words(kind: str, T: int) -> str:
    """Describe the pages of the cache of a text of T tokens, with the places of each."""
    (length,) = _room(kind, T).values()
    whose = "shipped" if page_sizes(T) == SHIPPED_PAGES else "small"
    return f"{whose}: {' + '.join(map(str, page_sizes(T).places(length)))} places"


def pieces(T: int) -> tuple[int, ...]:
    """Return the number of tokens in each piece of a text that is read through a cache.

    A short text: its first half, then one token at a time. A long one: two halves of most of it,
    then, across the edge of the first shipped page, so few tokens that they are written one by one.
    """
    if SHIPPED_PAGES.first >= T:
        return T // 2, *(T - T // 2) * (1,)
    half = (T - SHIPPED_PAGES.few_tokens + 1) // 2
    return half, half, T - 2 * half


def _room(kind: str, T: int) -> dict[str, int]:
    """Return the size of a cache: a ring if tokens see a sliding window."""
    return {"window": WINDOW[0] + 1} if kind == "sliding" else {"length": T}


def torch_pieces(kind: str) -> TorchCall:
    def call(module: TorchAttention, x: torch.Tensor) -> dict[str, torch.Tensor]:
        cache = _torch_cache(kind, module, x)
        outs = [module(piece, cache=cache) for piece in x.split(pieces(x.shape[1]), dim=1)]
        return {"output": torch.cat(outs, dim=1)}

    return call


def port_pieces(kind: str) -> PortCall:
    def call(module: GroupedQueryAttention, x: jax.Array) -> dict[str, jax.Array]:
        def step(cache: KVCache, piece_BTD: jax.Array) -> tuple[KVCache, jax.Array]:
            out, cache = module(piece_BTD, cache=cache)
            return cache, out

        B, T, D = x.shape
        cache, start, outs = _port_cache(kind, module, x), 0, []
        for n, alike in groupby(pieces(T)):
            end = start + n * len(list(alike))
            steps = x[:, start:end].reshape(B, -1, n, D).swapaxes(0, 1)
            cache, read = jax.lax.scan(step, cache, steps)
            outs.append(read.swapaxes(0, 1).reshape(B, -1, D))
            start = end
        return {"output": jnp.concatenate(outs, axis=1)}

    return call


def _chunks(B: int, T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (lengths, read, where) of the chunks until every row has read T tokens.

    lengths (chunks, B): the number of tokens that each row reads. read (chunks, B, width): the
    indices of the tokens that it is given; after those that count there is padding. where (B, T):
    the index of each token's output in the concatenated outputs of all chunks.
    """
    width, done = max(_PACE), np.zeros(B, int)
    lengths: list[np.ndarray] = []
    read: list[np.ndarray] = []
    where_BT = np.zeros((B, T), int)
    while done.min() < T:
        now = np.array([_PACE[(len(lengths) + b) % len(_PACE)] for b in range(B)])
        now = np.minimum(now, T - done)
        own = done[:, None] + np.arange(width)
        read.append(np.where(np.arange(width) < now[:, None], own, 0))
        for b, n in enumerate(now):
            where_BT[b, done[b] : done[b] + n] = len(lengths) * width + np.arange(n)
        lengths.append(now)
        done = done + now
    return np.array(lengths, np.int32), np.array(read), where_BT


def times_and_tokens(B: int, T: int, *, ragged: bool) -> tuple[int, int]:
    """Return the number of pieces or chunks, and of the tokens of a row, including padding."""
    if not ragged:
        return len(pieces(T)), T
    chunks = len(_chunks(B, T)[0])
    return chunks, chunks * max(_PACE)


def torch_ragged(kind: str) -> TorchCall:
    def call(module: TorchAttention, x: torch.Tensor) -> dict[str, torch.Tensor]:
        cache = _torch_cache(kind, module, x)
        lengths, read, where_BT = _chunks(*x.shape[:2])
        outs = [
            module(_torch_take(x, index), cache=cache, lengths=torch.from_numpy(now))
            for now, index in zip(lengths, read, strict=True)
        ]
        return {"output": _torch_take(torch.cat(outs, dim=1), where_BT)}

    return call


def port_ragged(kind: str) -> PortCall:
    def call(module: GroupedQueryAttention, x: jax.Array) -> dict[str, jax.Array]:
        B, T, D = x.shape
        lengths, read, where_BT = _chunks(B, T)

        def step(cache: KVCache, chunk: tuple[jax.Array, jax.Array]) -> tuple[KVCache, jax.Array]:
            x_BTD, lengths = chunk
            out, cache = module(x_BTD, mask=Mask.lengths(lengths), cache=cache)
            return cache, out

        chunks = jnp.stack([_take(x, index) for index in read]), jnp.asarray(lengths)
        _, outs = jax.lax.scan(step, _port_cache(kind, module, x), chunks)
        return {"output": _take(outs.swapaxes(0, 1).reshape(B, -1, D), where_BT)}

    return call


def _take(x_BTD: jax.Array, index_BT: np.ndarray) -> jax.Array:
    return jnp.take_along_axis(x_BTD, index_BT[..., None], axis=1)


def _torch_cache(kind: str, module: TorchAttention, x: torch.Tensor) -> torch_cache.KVCache:
    room: dict[str, Any] = _room(kind, x.shape[1])
    room |= {"num_kv_heads": module.num_kv_heads, "head_dim": module.head_dim}
    return torch_cache.KVCache(x.shape[0], **room, dtype=x.dtype)


def _port_cache(kind: str, module: GroupedQueryAttention, x: jax.Array) -> KVCache:
    room: dict[str, Any] = _room(kind, x.shape[1])
    room |= {"num_kv_heads": module.num_kv_heads, "head_dim": module.head_dim}
    kernel = module.q_proj.kernel[...]
    if (mesh := meshes.explicit_mesh((x, kernel))) is not None:
        # A scan's carry has one type: its sharding is that of the tokens and heads written to it.
        heads = meshes.cuts(kernel)[1]
        divides = module.num_kv_heads % math.prod(mesh.shape[name] for name in heads) == 0
        room["sharding"] = meshes.spec([meshes.cuts(x)[0], heads if divides else ()])
    sizes = page_sizes(x.shape[1])
    return KVCache.empty(x.shape[0], **room, dtype=x.dtype, page_sizes=sizes)


def _torch_take(x_BTD: torch.Tensor, index_BT: np.ndarray) -> torch.Tensor:
    index = torch.from_numpy(index_BT)[..., None].expand(-1, -1, x_BTD.shape[2])
    return x_BTD.gather(1, index)
