"""The torch design reads a text through its cache as it does at once."""

import pytest
import torch

from torch_ref.cache import KVCache
from torch_ref.gqa import GroupedQueryAttention
from torch_ref.rotary import DynamicNTK, Rotary

B, T, N, D = 2, 11, 6, 30
PIECES = {"at once": (11,), "token by token": (1,) * 11, "chunks": (5, 1, 3, 2)}


def module(num_kv_heads=3, **options):
    torch.manual_seed(0)
    return GroupedQueryAttention(D, N, num_kv_heads, head_dim=4, **options).double().eval()


def text():
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def cache_for(module, **size):
    heads = {"num_kv_heads": module.num_kv_heads, "head_dim": module.head_dim}
    return KVCache(B, **(size or {"length": T}), **heads, dtype=torch.float64)


def in_pieces(module, x, sizes, cache):
    return torch.cat([module(piece, cache=cache) for piece in x.split(sizes, dim=1)], dim=1)


def band(window=T):
    return torch.ones(T, T, dtype=torch.bool).tril().triu(1 - window)


# So many additions stand one after the other: in the projections, scores, softmax and weights.
ADDITIONS = D + 4 + T + T + 4 * N


def roundoff(full, x):
    """How far sums in another order may lie apart: by so many last bits of the input."""
    up = torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
    near = full(x * (1 + (2 * up - 1) * torch.finfo(x.dtype).eps))
    return ADDITIONS * (near - full(x)).abs().max()


def worst(got, full, x):
    """The largest difference from the full pass, over what roundoff allows."""
    return ((got - full(x)).abs().max() / roundoff(full, x)).item()


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("num_kv_heads", [1, 3, 6])
def test_pieces_give_the_causal_pass(num_kv_heads, pieces):
    m, x = module(num_kv_heads), text()
    cache = cache_for(m)
    got = in_pieces(m, x, PIECES[pieces], cache)
    assert worst(got, lambda x: m(x, is_causal=True), x) <= 1
    assert cache.filled.tolist() == [T, T]


@pytest.mark.parametrize("pieces", PIECES)
def test_a_ring_gives_the_sliding_window(pieces):
    m, x = module(), text()
    got = in_pieces(m, x, PIECES[pieces], cache_for(m, window=4))
    assert worst(got, lambda x: m(x, mask=band(window=4)), x) <= 1
    assert worst(got, lambda x: m(x, mask=band(window=5)), x) > 1, "one token more would be seen"


def test_rotary_positions_follow_from_the_cache():
    m, x = module(rotary=Rotary(base=20.0)), text()
    got = in_pieces(m, x, PIECES["chunks"], cache_for(m))
    assert worst(got, lambda x: m(x, is_causal=True), x) <= 1
    got[:, 5:6] = m(x[:, 5:6], cache=cache_for(m))
    assert worst(got, lambda x: m(x, is_causal=True), x) > 1, "the cache matters"


@pytest.mark.parametrize("window", [None, 4])
def test_rows_of_their_own_lengths(window):
    m, x = module(), text()
    cache = cache_for(m) if window is None else cache_for(m, window=window)
    read, outs = [0, 0], [[], []]
    for lengths in ([5, 1], [0, 5], [5, 0], [1, 5]):
        piece = torch.full((B, max(lengths), D), 7.0, dtype=torch.float64)
        for b, n in enumerate(lengths):
            piece[b, :n] = x[b, read[b] : read[b] + n]
        out = m(piece, cache=cache, lengths=torch.tensor(lengths))
        for b, n in enumerate(lengths):
            outs[b].append(out[b, :n])
            read[b] += n
    assert cache.filled.tolist() == read == [T, T]
    got = torch.stack([torch.cat(o) for o in outs])
    assert worst(got, lambda x: m(x, mask=band(window or T)), x) <= 1


def test_gradients_go_through_the_cache():
    m, x = module(), text().requires_grad_()
    weight = torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def gradients(run):
        return lambda x: torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad((run(x) * weight).sum(), [x, *m.parameters()])
            ]
        )

    full = gradients(lambda x: m(x, is_causal=True))
    got = gradients(lambda x: in_pieces(m, x, PIECES["chunks"], cache_for(m)))(x)
    assert worst(got, full, x) <= 1
    forgotten = gradients(lambda x: in_pieces(m, x, (11,), cache_for(m, window=10)))
    assert worst(forgotten(x), full, x) > 1, "a token forgotten is seen"


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
