"""What the torch design's cache refuses. Rows of the matrix judge what is read through it."""

import pytest
import torch

from torch_ref.cache import KVCache
from torch_ref.gqa import GroupedQueryAttention
from torch_ref.rotary import DynamicNTK, Rotary

B, T, N, D = 2, 11, 6, 30


def module(num_kv_heads=3, **options):
    torch.manual_seed(0)
    return GroupedQueryAttention(D, N, num_kv_heads, head_dim=4, **options).double().eval()


def text():
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def cache_for(module, **size):
    heads = {"num_kv_heads": module.num_kv_heads, "head_dim": module.head_dim}
    return KVCache(B, **(size or {"length": T}), **heads, dtype=torch.float64)


def test_what_does_not_fit_is_refused_before_anything_is_written():
    m, x = module(), text()
    cache = cache_for(m, length=10)
    with pytest.raises(ValueError, match="cache: expected at most 10 tokens a row, got 11"):
        m(x, cache=cache)
    assert not cache.keys.any()
    assert cache.filled.tolist() == [0, 0]


BAD = {
    "no size": (lambda: KVCache(B, num_kv_heads=1, head_dim=2), "expected one of them"),
    "both sizes": (
        lambda: KVCache(B, 3, window=3, num_kv_heads=1, head_dim=2),
        "expected one of them, got 3 and 3",
    ),
    "no batch": (lambda: KVCache(0, 3, num_kv_heads=1, head_dim=2), "batch: expected an int"),
    "a key": (lambda: module()(text(), text(), cache=cache_for(module())), "key: expected None"),
    "another module's": (
        lambda: module(2)(text(), cache=cache_for(module(3))),
        r"cache: expected B, K, H = \(2, 2, 4\) as in the call, got \(2, 3, 4\)",
    ),
    "lengths beyond the piece": (
        lambda: module()(text(), cache=cache_for(module()), lengths=torch.tensor([3, 12])),
        r"lengths: expected 2 integers of 0 to 11, a tensor; got tensor\(\[ 3, 12\]\)",
    ),
    "lengths that are no counts": (
        lambda: module()(text(), cache=cache_for(module()), lengths=torch.tensor([2.5, 4.0])),
        "lengths: expected 2 integers of 0 to 11",
    ),
    "lengths in a list": (
        lambda: module()(text(), cache=cache_for(module()), lengths=[3, 3]),
        r"lengths: expected 2 integers of 0 to 11, a tensor; got \[3, 3\]",
    ),
    "lengths and no cache": (
        lambda: module()(text(), lengths=torch.tensor([3, 3])),
        "lengths: expected None without a cache",
    ),
    "no cache at all": (lambda: module()(text(), cache={}), "cache: expected a KVCache, got dict"),
    "integers": (
        lambda: KVCache(B, 3, num_kv_heads=1, head_dim=2, dtype=torch.int64),
        "dtype: expected a floating dtype, got torch.int64",
    ),
    "dropout": (
        lambda: module(dropout=0.5).train()(text(), cache=cache_for(module())),
        r"cache: expected no dropout: call eval\(\) first",
    ),
    "frequencies that follow the text": (
        lambda: module(rotary=Rotary(scaling=DynamicNTK(2.0, 4)))(
            text(), cache=cache_for(module())
        ),
        "cache: cannot be combined with DynamicNTK",
    ),
    "keys of other inputs": (
        lambda: module(kdim=7)(text(), cache=cache_for(module())),
        "query: expected .* 7",
    ),
}


@pytest.mark.parametrize("row", BAD)
def test_what_cannot_be_is_refused_by_name(row):
    call, message = BAD[row]
    with pytest.raises(ValueError, match=message):
        call()
