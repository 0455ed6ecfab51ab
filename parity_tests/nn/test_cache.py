"""Tokens read in pieces, through a cache, give what they give read at once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers.attention import attention_definition as definition
from helpers.jaxprs import shapes
from jax_attn.attention import (
    Alibi,
    ArgumentError,
    DistanceBias,
    Mask,
    attend_with_cache,
    dot_product_attention,
)
from jax_attn.attention.kernels import cached
from jax_attn.attention.kv_cache import PageSizes
from jax_attn.attention.position_bias import alibi_slopes
from jax_attn.nn import KVCache, MultiHeadAttention

pytestmark = pytest.mark.filterwarnings("error")

B, L, N, K, H, HV = 2, 19, 6, 3, 5, 7
rows, cols = np.arange(L)[:, None], np.arange(L)[None]


SLOPES = 2.0 ** -np.array([2, 4, 6, 8, 1, 3])[:, None, None]  # ALiBi's, of six heads

# Pages of 10, 10, 20 and so on, and tiles of 5, so that few tokens lie in several.
SMALL = PageSizes(first=10, query_tile=5)


def draw(seed=0, dtype="float32", kv_heads=K):
    rng = np.random.default_rng(seed)
    shapes = (B, L, N, H), (B, L, kv_heads, H), (B, L, kv_heads, HV)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def empty(key, value, page_sizes=SMALL, **size):
    heads = {"num_kv_heads": key.shape[2], "head_dim": key.shape[3], "value_dim": value.shape[3]}
    return KVCache.empty(B, **size, **heads, dtype=key.dtype, page_sizes=page_sizes)


def in_chunks(sizes, arrays, cache, **options):
    """The outputs for all tokens, read so many at a time, and the cache after them."""
    outs, start = [], 0
    for size in sizes:
        chunk = (x[:, start : start + size] for x in arrays)
        out, cache = attend_with_cache(*chunk, cache, **options)
        outs.append(out)
        start += size
    return jnp.concatenate(outs, axis=1), cache


ALIBI = {"alibi": Alibi(N, factor=0.7)}
# Those of 0 to 6 keys back; keys farther back have the bias of 6.
NEAR = np.random.default_rng(1).standard_normal((N, 7))
DISTANCES = {"distances": DistanceBias(jnp.asarray(NEAR, jnp.float32), -6)}
BIASES = {
    "alibi": 0.7 * SLOPES * cols,
    "distances": NEAR.astype(np.float32)[:, np.clip(cols - rows, -6, 0) + 6].astype(np.float64),
}
# name -> (the cache's size, how it is called, which keys are visible)
KINDS = {
    "all": ({"length": L}, {}, cols <= rows),
    "more room than tokens": ({"length": 40}, {}, cols <= rows),
    "a window in the mask": (
        {"length": L},
        {"mask": Mask.window(3, 0)},
        (cols <= rows) & (cols >= rows - 3),
    ),
    "a ring of 4": ({"window": 4}, {}, (cols <= rows) & (cols > rows - 4)),
    "a window in a larger ring": (
        {"window": 8},
        {"mask": Mask.window(3, 0)},
        (cols <= rows) & (cols >= rows - 3),
    ),
    "a ring of two pages": ({"window": 11}, {}, (cols <= rows) & (cols > rows - 11)),
    "a ring that is never full": ({"window": 20}, {}, cols <= rows),
    "ALiBi": ({"length": L}, ALIBI, cols <= rows),
    "ALiBi in a ring": ({"window": 11}, ALIBI, (cols <= rows) & (cols > rows - 11)),
    "by distance": ({"length": L}, DISTANCES, cols <= rows),
    "by distance in a ring": ({"window": 11}, DISTANCES, (cols <= rows) & (cols > rows - 11)),
}
# Of more than 16 tokens whole pages are written.
SIZES = {
    "at once": (19,),
    "token by token": (1,) * L,
    "chunks": (7, 1, 1, 7, 1, 1, 1),
}


# Every kind in chunks; a cache and a ring of several pages each way.
EACH_WAY = ("all", "a ring of two pages", "ALiBi", "by distance")
READ = [
    pytest.param(k, s, marks=() if k in (*EACH_WAY, "a ring of 4") else pytest.mark.slow)
    for k in KINDS
    for s in SIZES
    if s == "chunks" or k in EACH_WAY
]


@pytest.mark.parametrize(("kind", "sizes"), READ)
def test_tokens_in_chunks_are_the_definition(kind, sizes):
    arrays = draw()
    size, options, allowed = KINDS[kind]
    got, cache = in_chunks(SIZES[sizes], arrays, empty(*arrays[1:], **size), **options)
    given = {"allowed": allowed, "bias": BIASES.get(next(iter(options), ""))}
    out, _ = definition.attend(*arrays, **given)
    budget, _ = definition.forward_budget("float32", *arrays, **given)
    assert definition.worst(got, out, budget) <= 1
    assert cache.filled.tolist() == [L, L]


def test_rounded_alibi_is_that_of_a_call_at_once():
    """Slopes and their products with positions are bfloat16 numbers, whatever the position."""
    (query, *others), alibi = draw(), Alibi(2 * N, rounded=True)
    arrays = [jnp.concatenate([query, query], axis=2), *others]
    got, _ = in_chunks(SIZES["chunks"], arrays, empty(*arrays[1:], length=L), alibi=alibi)
    exact = alibi_slopes(2 * N)[:, None, None]  # a third of them are no powers of two
    slopes, positions = (np.asarray(x, jnp.bfloat16) for x in (exact, cols))
    given = {"allowed": cols <= rows, "bias": np.asarray(slopes * positions, np.float64)}
    out, _ = definition.attend(*arrays, **given)
    budget, _ = definition.forward_budget("float32", *arrays, **given)
    assert definition.worst(got, out, budget) <= 1
    unrounded, _ = definition.attend(*arrays, **given | {"bias": exact * cols})
    assert definition.worst(got, unrounded, budget) > 10
    at_once = dot_product_attention(*arrays, is_causal=True, bias=alibi(L, L))
    assert definition.worst(at_once, out, budget) <= 1


def test_alibi_is_as_exact_far_into_a_text():
    """In float32, slope · position would be off by a tenth there."""
    arrays, (size, options, allowed) = draw(), KINDS["ALiBi in a ring"]
    far = moved(empty(*arrays[1:], **size), size["window"] * 2**19)
    got, _ = in_chunks(SIZES["chunks"], arrays, far, **options)
    given = {"allowed": allowed, "bias": 0.7 * SLOPES * cols}
    out, _ = definition.attend(*arrays, **given)
    budget, _ = definition.forward_budget("float32", *arrays, **given)
    after = slice(size["window"] - 1, None)  # tokens that see none of those that were never read
    assert definition.worst(got[:, after], out[:, after], budget[:, after]) <= 1


def test_a_module_goes_on_by_its_own_alibi_or_by_the_call_s():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((B, L, 12)), jnp.float32)
    own = MultiHeadAttention(12, 3, position_bias=Alibi(3), rngs=nnx.Rngs(0))
    plain = MultiHeadAttention(12, 3, rngs=nnx.Rngs(0))

    def in_two(module, **given):
        first, cache = module(x[:, :7], cache=module.empty_cache(B, L), **given)
        return np.concatenate([first, module(x[:, 7:], cache=cache, **given)[0]], axis=1)

    assert np.array_equal(in_two(own), in_two(plain, bias=Alibi(3)))
    assert not np.array_equal(in_two(own), in_two(plain))
    at_once = own(x, is_causal=True)
    assert np.array_equal(plain(x, is_causal=True, bias=Alibi(3)), at_once)
    assert not np.array_equal(plain(x, is_causal=True), at_once)


def moved(cache, by):
    return dataclasses.replace(cache, filled=cache.filled + by)


@pytest.mark.slow
def test_the_check_sees_a_token_forgotten():
    """By what more bugs are seen, `test_planted_bugs` says."""
    arrays = draw()
    first, cache = in_chunks((9,), [x[:, :9] for x in arrays], empty(*arrays[1:], length=L))
    rest, _ = in_chunks((10,), [x[:, 9:] for x in arrays], moved(cache, -1))
    out, _ = definition.attend(*arrays, allowed=cols <= rows)
    budget, _ = definition.forward_budget("float32", *arrays, allowed=cols <= rows)
    assert definition.worst(np.concatenate([first, rest], axis=1), out, budget) > 10


@pytest.mark.slow
def test_rows_of_their_own_lengths():
    """Each chunk holds as many real tokens a row as it says; the rest may be anything."""
    arrays = draw(1)
    size, _, allowed = KINDS["a ring of 4"]
    cache = empty(*arrays[1:], **size)
    read, outs = np.zeros(B, int), [[], []]
    for lengths in ([7, 4], [3, 0], [1, 3], [7, 5], [1, 7]):
        T = max(lengths)
        chunk = []
        for x in arrays:
            padded = np.full((B, T, *x.shape[2:]), 9, x.dtype)
            for b, n in enumerate(lengths):
                padded[b, :n] = x[b, read[b] : read[b] + n]
            chunk.append(jnp.asarray(padded))
        out, cache = attend_with_cache(*chunk, cache, Mask.lengths(np.array(lengths)))
        for b, n in enumerate(lengths):
            outs[b].append(np.asarray(out)[b, :n])
        read += lengths
    assert cache.filled.tolist() == read.tolist() == [L, L]
    want, _ = definition.attend(*arrays, allowed=allowed)
    budget, _ = definition.forward_budget("float32", *arrays, allowed=allowed)
    assert definition.worst(np.stack([np.concatenate(o) for o in outs]), want, budget) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kv_heads"), [("bfloat16", 1), ("float16", 2), ("float64", 6)])
def test_every_dtype_and_grouping_with_scale_and_softcap(dtype, kv_heads):
    with jax.enable_x64(dtype == "float64"):
        arrays = draw(2, dtype, kv_heads)
        options = {"scale": 0.7, "softcap": 1.5}
        got, cache = in_chunks((9, 1, 9), arrays, empty(*arrays[1:], length=L), **options)
        assert got.dtype == cache.keys[0].dtype == dtype
        wanted = {"allowed": cols <= rows, **options}
        out, _ = definition.attend(*map(np.asarray, arrays), **wanted)
        budget, _ = definition.forward_budget(dtype, *map(np.asarray, arrays), **wanted)
        assert definition.worst(got, out, budget) <= 1


@pytest.mark.slow
def test_gradients_are_those_of_a_full_pass(monkeypatch):
    # The first chunk by the blocked kernel, whose log-sum-exp has a gradient, too. No other test
    # has read chunks of this length.
    monkeypatch.setattr(cached, "FEW_SCORES", 64)
    with jax.enable_x64(True):
        arrays = draw(3, "float64")
        weight = np.random.default_rng(4).standard_normal((B, L, N, HV))

        def loss(*arrays):
            out, _ = in_chunks((11, 8), arrays, empty(*arrays[1:], length=L))
            return (out * weight).sum()

        told = (weight, *map(np.asarray, arrays))
        *wants, _ = definition.gradients(*told, allowed=cols <= rows)
        *budgets, _ = definition.gradient_budget("float64", *told, allowed=cols <= rows)
        gots = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)
        for got, want, budget in zip(gots, wants, budgets, strict=True):
            assert definition.worst(got, want, budget) <= 1


@pytest.mark.slow
def test_decoding_in_a_scan_compiles_one_step_that_writes_in_place():
    arrays = draw(5)
    prompt, rest = [x[:, :9] for x in arrays], [x[:, 9:].swapaxes(0, 1) for x in arrays]
    cache = empty(*arrays[1:], length=512)
    first, cache = attend_with_cache(*prompt, cache)

    def step(cache, token):
        out, cache = attend_with_cache(*(x[:, None] for x in token), cache)
        return cache, out[:, 0]

    decode = jax.jit(lambda cache, *tokens: jax.lax.scan(step, cache, tokens), donate_argnums=0)
    compiled = decode.lower(cache, *rest).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.nbytes
    assert memory.temp_size_in_bytes < cache.nbytes / 4, "no page is copied"
    pages = [*cache.keys, *cache.values]
    cache, outs = compiled(cache, *rest)
    assert all(page.is_deleted() for page in pages)
    got = np.concatenate([first, outs.swapaxes(0, 1)], axis=1)
    out, _ = definition.attend(*arrays, allowed=cols <= rows)
    budget, _ = definition.forward_budget("float32", *arrays, allowed=cols <= rows)
    assert definition.worst(got, out, budget) <= 1


@pytest.mark.slow
def test_pages_that_hold_nothing_are_not_read():
    arrays = draw(6)
    cache = empty(*arrays[1:], PageSizes(first=4), length=L)
    spoilt = dataclasses.replace(
        cache,
        keys=(*cache.keys[:2], *(page * jnp.nan for page in cache.keys[2:])),
        values=(*cache.values[:2], *(page * jnp.nan for page in cache.values[2:])),
    )
    chunk = [x[:, :5] for x in arrays]
    clean, _ = attend_with_cache(*chunk, cache)
    assert np.array_equal(attend_with_cache(*chunk, spoilt)[0], clean)
    assert np.isnan(attend_with_cache(*chunk, moved(spoilt, 9))[0]).all(), (
        "the check sees a page that is read"
    )


@pytest.mark.slow
@pytest.mark.parametrize("tile", [5, 19])
def test_scores_of_a_page_are_written_out_a_tile_at_a_time(tile):
    """With one tile for all the check sees the whole of them."""
    arrays, sizes = draw(8), PageSizes(first=10, query_tile=tile)

    def loss(*arrays):
        return attend_with_cache(*arrays, moved(empty(*arrays[1:], sizes, length=40), 13))[0].sum()

    made = shapes(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*arrays).jaxpr)
    assert any(shape[-2:] == (L, 10) for shape in made) == (tile == L)


class TestOverflow:
    def test_is_an_error_before_anything_is_written(self):
        arrays = draw(7)
        cache = empty(*arrays[1:], length=18)
        with pytest.raises(
            ArgumentError, match=r"at most 18 tokens a row, got 19: it holds \[0, 0\]"
        ):
            attend_with_cache(*arrays, cache)
        assert not any(np.asarray(page).any() for page in (*cache.keys, *cache.values))

    @pytest.mark.slow
    def test_under_jit_is_nan_in_the_rows_that_overflow(self):
        arrays = draw(7)
        cache = empty(*arrays[1:], length=18)
        lengths = Mask.lengths(np.array([18, 19]))
        out, grown = jax.jit(attend_with_cache)(*arrays, cache, lengths)
        assert np.isfinite(out[0, :18]).all()
        assert np.isnan(out[1]).all()
        assert grown.filled.tolist() == [18, 19]

    @pytest.mark.slow
    def test_a_ring_ends_where_int32_does(self):
        arrays = draw(7)
        filled = jnp.array([2**31 - 1 - L, 2**31 - L], jnp.int32)
        cache = dataclasses.replace(empty(*arrays[1:], window=5), filled=filled)
        out, _ = jax.jit(attend_with_cache)(*arrays, cache)
        assert np.isfinite(out[0]).all()
        assert np.isnan(out[1]).all()
        with pytest.raises(ArgumentError, match=r"got 2147483648: .* the call adds .*19"):
            attend_with_cache(*arrays, cache)

    @pytest.mark.slow
    def test_what_is_there_is_not_written_over(self):
        arrays = draw(7)
        _, full = attend_with_cache(*arrays, empty(*arrays[1:], length=L))
        for T in (1, 17):  # by token and by page
            _, after = jax.jit(attend_with_cache)(*(x[:, :T] for x in arrays), full)
            pairs = zip((*full.keys, *full.values), (*after.keys, *after.values), strict=True)
            assert all(np.array_equal(a, b) for a, b in pairs)


def test_a_cache_says_what_it_is():
    told = str(KVCache.empty(2, 5, num_kv_heads=3, head_dim=4, value_dim=6))
    assert told == "KVCache(length=5, float32 B=2 K=3 H=4 Hv=6, 0.0 MiB)"
    cache = KVCache.empty(2, 5, num_kv_heads=3, head_dim=4, value_dim=6)
    assert str(jax.eval_shape(lambda: cache)) == told
    assert str(jax.tree.map(lambda _: 0, cache)).startswith("KVCache(keys=(0,), values=(0,), ")
