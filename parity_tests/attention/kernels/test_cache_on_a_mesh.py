"""A cache on eight devices, cut along batch, heads or places, is that of one device."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

from helpers.attention.kernel_comparison import draws, rounding
from helpers.attention.meshes import KINDS, mesh, placed
from jax_attn.attention import Alibi, KVCache, Mask, attend_with_cache
from jax_attn.attention.checks import ArgumentError
from jax_attn.attention.kernels.partial_softmax import PartialSoftmax
from jax_attn.attention.kv_cache import PageSizes
from jax_attn.parity.run.traffic import sent

pytestmark = pytest.mark.filterwarnings("error")
B, T, N, H = 8, 12, 8, 5
LENGTHS = np.array([3, 1, 0, 2, 3, 3, 2, 1])
HEADS, PLACES = {"rows": 2, "heads": 4}, {"rows": 2, "heads": 2, "places": 2}


class Row(NamedTuple):
    """axes: of the mesh. K: key/value heads. size: the cache's, of which each page is even.

    places: the axis that cuts the cache's places. has_alibi: whether scores have its bias.
    """

    kind: str
    axes: dict[str, int]
    K: int
    size: dict[str, int]
    places: str | None = None
    has_alibi: bool = False

    @property
    def heads(self) -> str | None:
        """What cuts the key/value heads: where they are fewer than the devices, nothing."""
        is_cut = self.K % self.axes["heads"] == 0 and self.places != "heads"
        return "heads" if is_cut else None

    @property
    def sharding(self) -> P:
        return P("rows", self.heads, self.places)


ROWS = {
    "heads": Row("explicit", HEADS, 4, {"length": T}),
    "few heads, a ring": Row("explicit", HEADS, 2, {"window": 6}),
    "one head": Row("explicit", HEADS, 1, {"length": T}),
    "heads, auto, a ring": Row("auto", HEADS, 4, {"window": 6}),
    "few heads, auto": Row("auto", HEADS, 2, {"length": T}),
    "one head, auto, a ring": Row("auto", HEADS, 1, {"window": 6}),
    "places": Row("explicit", PLACES, 4, {"length": T}, "places"),
    "places of one head": Row("explicit", PLACES, 1, {"length": T}, "places"),
    "places of a ring": Row("explicit", PLACES, 4, {"window": 6}, "places"),
    "places along the heads' axis": Row("explicit", HEADS, 1, {"length": T}, "heads"),
    "places of several heads along it": Row("explicit", HEADS, 4, {"length": T}, "heads"),
    "places, auto": Row("auto", PLACES, 4, {"length": T}, "places"),
    "ALiBi, few heads": Row("explicit", HEADS, 2, {"length": T}, has_alibi=True),
    "ALiBi, heads, auto": Row("auto", HEADS, 4, {"length": T}, has_alibi=True),
    "ALiBi, places of a ring": Row("explicit", PLACES, 4, {"window": 6}, "places", has_alibi=True),
}


def read(alibi, cache, q, k, v, lengths=None):
    mask = None if lengths is None else Mask.lengths(lengths)
    return attend_with_cache(q, k, v, cache, mask, alibi=alibi)


def last(alibi, cotangent, cache, *chunk):
    def of_floats(chunk, keys, values):
        return read(alibi, replace(cache, keys=keys, values=values), *chunk)[0]

    out, pull = jax.vjp(of_floats, chunk, cache.keys, cache.values)
    return out, jax.tree.leaves(pull(cotangent))


CHUNKS = ((4, None), (1, None), (3, LENGTHS))
"""Lengths, and which of the tokens are a row's own."""


def jitted(function, has_alibi: bool):
    return jax.jit(functools.partial(function, Alibi(N) if has_alibi else None))


def run(cache, cotangent, *arrays, chunks=CHUNKS, has_alibi=False):
    """Outputs of each chunk, then those of two more tokens and their gradients; and the cache."""
    outs, at = [], 0
    for length, lengths in chunks:
        chunk = (x[:, at : at + length] for x in arrays)
        out, cache = jitted(read, has_alibi)(cache, *chunk, lengths)
        outs.append(out)
        at += length
    if cotangent is None:
        return outs, cache
    chunk = (x[:, at : at + 2] for x in arrays)
    out, grads = jitted(last, has_alibi)(cotangent[:, :2], cache, *chunk)
    return [*outs, out, *grads], cache


def arrays_of(K: int) -> list[np.ndarray]:
    """Cotangents, queries, keys and values."""
    return draws(*((B, T, N, H), (B, T, N, H), (B, T, K, H), (B, T, K, H)), dtype=np.float64)


def empty_cache(K: int, size: dict[str, int], sharding: P | None = None) -> KVCache:
    pages = PageSizes(first=4, query_tile=2)
    made = {"num_kv_heads": K, "head_dim": H, "dtype": np.float64, "page_sizes": pages}
    return KVCache.empty(B, **size, **made, sharding=sharding)


def on_one_device(row: Row) -> tuple[list[Any], KVCache]:
    return _on_one_device(row.K, tuple(row.size.items()), row.has_alibi)


@functools.cache
def _on_one_device(
    K: int, size: tuple[tuple[str, int], ...], has_alibi: bool
) -> tuple[list[Any], KVCache]:
    """It knows no mesh: rows of the same sizes share it."""
    return run(empty_cache(K, dict(size)), *arrays_of(K), has_alibi=has_alibi)


def placed_arrays(row: Row, on: jax.sharding.Mesh) -> list[jax.Array]:
    of_keys = P("rows", None, row.heads)
    return placed(on, arrays_of(row.K), [P("rows", None, "heads")] * 2 + [of_keys] * 2)


def is_equal(arrays: list[np.ndarray], found: list[Any], wanted: list[Any]) -> bool:
    cotangent, q, k, v = arrays
    return all(
        np.abs(np.asarray(got) - want).max() <= rounding((q, k, v, cotangent), want)
        for got, want in zip(found, wanted, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_cache_on_a_mesh(name):
    row = ROWS[name]
    with jax.enable_x64(True):
        wanted, wanted_cache = on_one_device(row)
        on = mesh(row.kind, **row.axes)
        given = placed_arrays(row, on)
        with jax.set_mesh(on):
            empty = empty_cache(row.K, row.size, row.sharding)
            found, cache = run(empty, *given, has_alibi=row.has_alibi)
            tokens = (x[:, :1] for x in given[1:])
            step = jitted(read, row.has_alibi).lower(cache, *tokens).compile()
        assert is_equal(arrays_of(row.K), found, wanted)
        for got, want in zip(*map(jax.tree.leaves, (cache, wanted_cache)), strict=True):
            assert (np.asarray(got) == want).all()
        data, heads, places = row.sharding
        cuts = ((cache.keys, P(data, heads, None, places)), (cache.values, P(data, heads, places)))
        for page, at in ((page, at) for pages, at in cuts for page in pages):
            assert page.sharding.is_equivalent_to(NamedSharding(on, at), 4)
        # A partitioner adds up decisions that concern all rows: whether to read a page, and whether
        # to write it, in one byte each.
        decisions = 2 * len(cache.keys)
        sends = [each for each in sent(step.as_text()) if each.bytes > decisions]
        assert row.kind == "auto" or sends == sent(step.as_text())
        # Of each query a maximum, a sum and a mean, for each page in an Auto mesh.
        shared = row.places == "heads"  # each device then attends with all heads
        query = B // 2 * N // (1 if shared else row.axes["heads"]) * 8
        most = query * (H + 2) * (len(cache.keys) if row.kind == "auto" else 1)
        most += query * H if shared else 0
        kinds = {"all-reduce", "all-gather"} if shared else {"all-reduce"}
        assert {each.kind for each in sends} == (kinds if places else set())
        assert sum(each.bytes for each in sends) <= (most if places else 0)


@pytest.mark.slow
def test_a_scan_keeps_the_places_that_share_the_heads_axis():
    on = mesh("explicit", rows=2, heads=4)
    with jax.set_mesh(on):
        made = {"num_kv_heads": 1, "head_dim": H, "sharding": P("rows", None, "heads")}
        empty = KVCache.empty(B, T, **made)
        q, kv = (jax.numpy.ones((B, 1, heads, H)) for heads in (N, 1))
        q, kv = placed(on, (q, kv), [P("rows", None, "heads"), P("rows")])

        def step(cache, _):
            out, cache = attend_with_cache(q, kv, kv, cache)
            return cache, out

        cache, outs = jax.jit(lambda: jax.lax.scan(step, empty, length=3))()
    assert cache.values[0].sharding.spec == P("rows", None, "heads", None)
    assert outs.sharding.spec == P(None, "rows", None, "heads", None)


@pytest.mark.slow
def test_heads_keep_what_neither_rows_nor_places_take():
    on = mesh("explicit", a=2, b=2)
    with jax.set_mesh(on):
        made = {"num_kv_heads": 1, "head_dim": H, "sharding": P("b", None, "a")}
        cache = KVCache.empty(B, T, **made)
        q, kv = (jax.numpy.ones((B, 1, heads, H)) for heads in (N, 1))
        (q,) = placed(on, (q,), [P(None, None, ("a", "b"))])
        out, cache = attend_with_cache(q, kv, kv, cache)
    assert out.sharding.spec == P("b", None, "a", None)
    assert cache.values[0].sharding.spec == P("b", None, "a", None)


def by_own_maximum(self, axes):
    sums = jax.lax.psum((self.total, self.weighted), axes)
    return PartialSoftmax(jax.lax.pmax(self.maximum, axes), *sums)


BUGS = {
    "sums by each device's own maximum": ("summed", by_own_maximum),
    "the call's own keys on every device": ("of_no_keys", lambda self: self),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_seen(name, monkeypatch):
    method, bug = BUGS[name]
    row = ROWS["places"]
    with jax.enable_x64(True):
        wanted, _ = on_one_device(row)
    monkeypatch.setattr(PartialSoftmax, method, bug)
    jax.clear_caches()  # of programs without the bug
    try:
        with jax.enable_x64(True), jax.set_mesh(on := mesh(row.kind, **row.axes)):
            _, *given = placed_arrays(row, on)
            empty = empty_cache(row.K, row.size, row.sharding)
            found, _ = run(empty, None, *given, chunks=CHUNKS[:2])
            assert not is_equal(arrays_of(row.K), found, wanted[:2])
    finally:
        jax.clear_caches()


def test_a_cache_is_made_cut():
    for kind in KINDS:
        with jax.set_mesh(mesh(kind, rows=2, heads=4)):
            made = {"num_kv_heads": N, "head_dim": H, "sharding": P("rows", "heads")}
            make = functools.partial(KVCache.empty, B, T, **made)
            for cache in (make(), jax.jit(make)()):
                for x in (*cache.keys, *cache.values):
                    assert x.sharding.spec[:2] == ("rows", "heads"), kind
                assert cache.filled.sharding.spec[0] == "rows"
    assert KVCache.empty(B, T, **made).keys[0].sharding.is_fully_replicated


@pytest.mark.parametrize(
    ("sharding", "text"),
    [
        (P("rows", "tp"), "sharding: expected axes of the mesh ('rows', 'heads'), got ['tp']"),
        (P("heads", "heads"), "sharding: expected each axis of the mesh once, got ['heads']"),
        (P("rows", None, "heads", None), "sharding: expected at most 3 axes"),
        (
            P(None, None, ("rows", "heads")),
            "sharding: expected parts whose number divides 12, got 8",
        ),
        (P("rows", ("heads", "rows")), "sharding: expected parts whose number divides 4, got 8"),
    ],
)
def test_a_cache_that_cannot_be_cut_is_refused(sharding, text):
    with jax.set_mesh(mesh("auto", rows=2, heads=4)), pytest.raises(ArgumentError) as told:
        KVCache.empty(B, T, num_kv_heads=4, head_dim=H, sharding=sharding)
    assert text in str(told.value)


@pytest.mark.slow
def test_a_cache_that_lies_whole_is_cut_as_the_call():
    """As `KVCache.empty` makes it."""
    with jax.enable_x64(True):
        q, k, v = draws(*((B, 4, N, H),) * 3, dtype=np.float64)
        empty = KVCache.empty(B, T, num_kv_heads=N, head_dim=H, dtype=np.float64)
        on = mesh("explicit", rows=2, heads=4)
        out, cache = attend_with_cache(
            *placed(on, (q, k, v), [P("rows", None, "heads")] * 3), empty
        )
        assert cache.keys[0].sharding.spec == P("rows", "heads", None, None)
        assert is_equal([out, q, k, v], [out], [attend_with_cache(q, k, v, empty)[0]])
