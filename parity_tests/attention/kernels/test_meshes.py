"""Attention on eight devices: equal to that on one, cut as the query is, nothing sent in vain."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax._src.interpreters import mlir
from jax.sharding import NamedSharding

from helpers.attention.kernel_comparison import draws, in_tiles, rounding
from helpers.attention.meshes import KINDS, collectives, mesh, placed
from jax_attn.attention import (
    Dropout,
    Mask,
    attention_weights,
    dot_product_attention,
    explain,
)
from jax_attn.attention.kernels.mesh.shards import Shards

pytestmark = pytest.mark.filterwarnings("error")
B, T, S, N, H = 8, 13, 11, 8, 5
KERNELS = {"blocked": in_tiles(2, 5, 3), "dense": "dense", "the default": None}
ROWS_AND_HEADS = P("rows", None, "heads")


class Row(NamedTuple):
    """K: key/value heads. query, key, bias: how these lie on a mesh of 2 rows × 4 heads; bias: its
    shape, too. sums: whether gradients of what several devices have alike are summed. whole: the
    kinds of mesh in which gradients that were computed in parts must lie whole: in an Explicit one
    they have the type of their array; in an Auto one Shardy would cut them by a part of an axis."""

    K: int = N
    query: P = ROWS_AND_HEADS
    key: P = ROWS_AND_HEADS
    bias: tuple[tuple[int, ...], P] | None = None
    options: Mapping[str, Any] = MappingProxyType({})
    sums: bool = False
    whole: tuple[str, ...] = ()


def ids(length):
    return np.sort(np.random.default_rng(length).integers(0, 3, (B, length)), axis=1)


EXTRA_KEYS = dict(
    zip(("bias_k", "bias_v", "sinks"), draws((4, H), (4, H), (N,), dtype=np.float64), strict=True)
)
ROWS = {
    "batch": Row(query=P("rows"), key=P("rows")),
    "batch over both axes of the mesh": Row(query=P(("rows", "heads")), key=P(("rows", "heads"))),
    "heads": Row(query=P(None, None, "heads"), key=P(None, None, "heads")),
    "both": Row(),
    "both, keys everywhere": Row(key=P(), whole=("explicit",)),
    "grouped": Row(K=4),
    "one key/value head": Row(K=1, key=P("rows"), sums=True),
    "fewer key/value heads than devices": Row(K=2, key=P("rows"), sums=True, whole=("auto",)),
    "a bias of all": Row(bias=((1, N, T, S), P(None, "heads")), sums=True),
    "a bias of all heads and rows": Row(bias=((T, S), P()), sums=True),
    "a bias cut with the rest": Row(bias=((B, N, T, S), P("rows", "heads"))),
    "lengths": Row(options={"mask": Mask.lengths(np.array([11, 4, 1, 7, 2, 9, 11, 3]))}),
    "a window": Row(options={"mask": Mask.window(3, 2)}),
    "bands by row": Row(options={"mask": Mask.causal(np.array([0, 2, -1, 5, 1, 1, -3, 0]))}),
    "segments": Row(options={"mask": Mask.segments(ids(T), ids(S))}),
    "booleans": Row(options={"mask": Mask.array(draws((B, 1, T, S))[0] < 0.5)}),
    "dropout": Row(K=4, options={"dropout": Dropout(0.3, key=jax.random.key(5))}),
    "dropout handed in": Row(options={"dropout": Dropout(0.3, keep=draws((1, N, T, S))[0] < 0.5)}),
    "a learned key, a zero and sinks": Row(K=4, options=EXTRA_KEYS | {"add_zero_attn": True}),
    "a softcap in causal order": Row(options={"is_causal": True, "softcap": 2.0}),
}


def both_passes(kernel, options, cotangent, *arrays):
    def attend(q, k, v, *bias):
        given = {"bias": bias[0]} if bias else {}
        return dot_product_attention(q, k, v, implementation=kernel, **given, **options)

    out, pull = jax.vjp(attend, *arrays)
    return out, *pull(cotangent)


def by_blocked(q, k, v):
    return dot_product_attention(q, k, v, implementation=KERNELS["blocked"])


def operands(row):
    """(cotangent, query, key, value[, bias]) and how they are cut."""
    q, k, v, cotangent = draws(
        (B, T, N, H), (B, S, row.K, H), (B, S, row.K, H), (B, T, N, H), dtype=np.float64
    )
    arrays, specs = [cotangent, q, k, v], [row.query, row.query, row.key, row.key]
    if row.bias is not None:
        arrays += draws(row.bias[0], dtype=np.float64, seed=1)
        specs.append(row.bias[1])
    return arrays, specs


def assert_equal(arrays, found, wanted):
    cotangent, q, k, v, *_ = arrays
    for got, want in zip(found, wanted, strict=True):
        assert np.abs(np.asarray(got) - want).max() <= rounding((q, k, v, cotangent), want)


# In an Auto mesh XLA cuts dense by itself; in an Explicit one it is run as blocked is.
CASES = [
    *((kind, name, "blocked") for kind in KINDS for name in ROWS),
    *(("explicit", name, "dense") for name in ("both", "dropout", "a bias of all")),
    ("explicit", "fewer key/value heads than devices", "dense"),
    ("auto", "fewer key/value heads than devices", "dense"),
    ("auto", "dropout", "dense"),
    *((kind, "both", "the default") for kind in KINDS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "kernel"), CASES)
def test_equal_to_one_device_and_cut_as_the_query(kind, name, kernel):
    row = ROWS[name]

    def run(*arrays):
        return both_passes(KERNELS[kernel], row.options, *arrays)

    with jax.enable_x64(True):
        arrays, specs = operands(row)
        there = placed(mesh(kind, rows=2, heads=4), arrays, specs)
        program = jax.jit(run).lower(*there).compile()
        found = program(*there)
        assert_equal(arrays, found, jax.jit(run)(*arrays))
        assert found[0].sharding.is_equivalent_to(there[1].sharding, 4)
        if kind == "auto":  # in an Explicit mesh JAX would have to be told of any
            forward = jax.jit(lambda *arrays: run(*arrays)[0]).lower(*there).compile()
            assert collectives(forward) == {}
        sent = collectives(program).keys()
        allowed = {"all-reduce"} if row.sums else set()
        allowed |= {"all-gather"} if kind in row.whole else set()
        assert sent == allowed or (kind, kernel, row.K) == ("auto", "dense", 2)


BUGS = {
    "no sum over devices": ("auto", "a bias of all", "lacking", lambda *_: ()),
    "the first key/value head for all": (
        "explicit",
        "fewer key/value heads than devices",
        "_first",
        lambda *_: jnp.int32(0),
    ),
    "dropout alike on every device": ("auto", "dropout", "_first", lambda *_: jnp.int32(0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_seen(name, monkeypatch):
    kind, row, method, bug = BUGS[name]
    monkeypatch.setattr(Shards, method, bug)
    # The program for TPUs, in which some bugs would raise, is not traced.
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, tpu, default: default(*x))
    jax.clear_caches()  # of programs without the bug
    try:
        with pytest.raises(AssertionError):
            test_equal_to_one_device_and_cut_as_the_query(kind, row, "blocked")
    finally:
        jax.clear_caches()


def as_it_is(attend, *arrays):
    return attend(*arrays)


def in_a_vmap(attend, *arrays):
    q, k, v = arrays
    return jax.vmap(attend, in_axes=(0, None, 0))(jnp.stack([q, 2 * q]), k, jnp.stack([v, v]))[1]


def in_a_vmap_over_the_batch(attend, *arrays):
    """Over an axis that the mesh cuts."""
    return jax.vmap(attend)(*(x[:, None] for x in arrays))[:, 0]


def in_a_vmap_of_a_vmap(attend, *arrays):
    q, k, v = (x[None, :, None] for x in arrays)
    inner = jax.vmap(attend, in_axes=1, out_axes=1)
    return jax.vmap(inner)(q, k, v)[0, :, 0]


def rematerialized(attend, *arrays):
    return jax.checkpoint(attend)(*arrays)


def in_a_scan(attend, *arrays):
    q, *kv = arrays
    return jax.lax.scan(lambda q, _: (attend(q, *kv), None), q, length=2)[0]


TRANSFORMS = (
    as_it_is,
    in_a_vmap,
    in_a_vmap_over_the_batch,
    in_a_vmap_of_a_vmap,
    rematerialized,
    in_a_scan,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiled", "transform"),
    [("eager", as_it_is), ("eager", in_a_vmap), *(("jit", transform) for transform in TRANSFORMS)],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
@pytest.mark.parametrize("kind", KINDS)
def test_transforms(kind, compiled, transform):
    row = ROWS["grouped"]

    def run(cotangent, *arrays):
        def attend(q, k, v):
            return dot_product_attention(
                q, k, v, implementation=KERNELS["blocked"], mask=Mask.window(3, 2)
            )

        out, pull = jax.vjp(lambda *arrays: transform(attend, *arrays), *arrays)
        return out, *pull(cotangent)

    with jax.enable_x64(True):
        arrays, specs = operands(row)
        there = placed(mesh(kind, rows=2, heads=4), arrays, specs)
        found = (jax.jit(run) if compiled == "jit" else run)(*there)
        assert_equal(arrays, found, jax.jit(run)(*arrays))


def test_settings_of_the_caller_hold_on_each_device(monkeypatch):
    """The compiler calls for a device's program in a thread of its own."""
    read, here = [], Shards.here

    def recorded(shards, call):
        config = jax.config
        read.append((config.jax_default_matmul_precision, config.jax_numpy_dtype_promotion))
        return here(shards, call)

    monkeypatch.setattr(Shards, "here", recorded)
    q, k, v = (x.astype(np.float32) for x in operands(Row())[0][1:])
    there = placed(mesh("auto", rows=2, heads=4), (q, k, v), [ROWS_AND_HEADS] * 3)
    with jax.default_matmul_precision("tensorfloat32"), jax.numpy_dtype_promotion("strict"):
        jax.jit(lambda *a: dot_product_attention(*a, implementation="blocked"))(*there)
    assert set(read) == {("tensorfloat32", "strict")}


@pytest.mark.slow
def test_a_vmap_over_the_batch_beside_a_bias_of_all():
    """Each row that is mapped has a gradient of its own; the bias has the sum."""
    row = ROWS["a bias of all"]

    def run(cotangent, *arrays):
        def attend(q, k, v, bias):
            return dot_product_attention(q, k, v, bias=bias, implementation=KERNELS["blocked"])

        def rows(q, k, v, bias):
            each = jax.vmap(attend, in_axes=(0, 0, 0, None))
            return each(q[:, None], k[:, None], v[:, None], bias)[:, 0]

        out, pull = jax.vjp(rows, *arrays)
        return out, *pull(cotangent)

    with jax.enable_x64(True):
        arrays, specs = operands(row)
        for kind in KINDS:
            there = placed(mesh(kind, rows=2, heads=4), arrays, specs)
            assert_equal(arrays, jax.jit(run)(*there), jax.jit(run)(*arrays))


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_shard_map_over_one_axis_of_the_mesh(kind):
    with jax.enable_x64(True):
        arrays = operands(Row())[0]
        _, *qkv = arrays
        on = mesh(kind, rows=2, heads=4)
        attend = partial(dot_product_attention, implementation=KERNELS["blocked"])
        spec = P("rows")
        by_rows = jax.shard_map(
            attend, mesh=on, axis_names={"rows"}, in_specs=(spec,) * 3, out_specs=spec
        )
        found = jax.jit(by_rows)(*placed(on, qkv, [ROWS_AND_HEADS] * 3))
        assert_equal(arrays, [found], [attend(*qkv)])


def parts_of_a_fused_projection(attend, x, kernel):
    """Query, key and value heads lie in one kernel, so that a device's part is of several."""
    heads = jnp.einsum("btd,dnh->btnh", x, kernel)
    return attend(heads[:, :, :N], heads[:, :, N : N + 2], heads[:, :, N + 2 :])


def a_part_of_the_batch(attend, x, kernel):
    """6 rows, which 4 devices cannot share evenly."""
    return parts_of_a_fused_projection(attend, x[:6], kernel)


@pytest.mark.slow
@pytest.mark.parametrize("model", [parts_of_a_fused_projection, a_part_of_the_batch])
@pytest.mark.parametrize("cut", [P(None, "heads"), P()])
def test_arrays_that_are_cut_unevenly(model, cut):
    attend = partial(dot_product_attention, implementation=KERNELS["blocked"])
    x, kernel = draws((B, T, 7), (7, N + 4, H), dtype=np.float64)
    with jax.enable_x64(True):
        wanted = model(attend, x, kernel)
        on = mesh("auto", heads=2, rows=4)
        there = placed(on, (x, kernel), [P("rows"), cut])
        found = jax.jit(partial(model, attend))(*there)
        assert np.abs(found - wanted).max() <= rounding((x, kernel, x, x), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_with_fewer_key_value_heads_than_devices(kind):
    with jax.enable_x64(True):
        _, q, k, _ = operands(Row(K=2))[0]
        there = placed(mesh(kind, rows=2, heads=4), (q, k), [ROWS_AND_HEADS, P("rows")])
        found = jax.jit(attention_weights)(*there)
        assert found.sharding.spec[:2] == ("rows", "heads")
        wanted = attention_weights(q, k)
        assert np.abs(found - wanted).max() <= rounding((q, k, k, q), wanted)


@pytest.mark.parametrize("is_in_mesh", [False, True])
def test_no_tracer_outlives_its_trace(is_in_mesh):
    q, k, v = (x.astype(np.float32) for x in operands(Row())[0][1:])
    if is_in_mesh:
        q, k, v = placed(mesh("auto", rows=2, heads=4), (q, k, v), [ROWS_AND_HEADS] * 3)
    with jax.checking_leaks():
        jax.jit(lambda *a: dot_product_attention(*a, implementation="blocked")).lower(q, k, v)


def test_what_the_partitioner_is_given_names_no_line_of_ours(monkeypatch):
    """XLA follows stack frames of what it is told to cut without end where they form a circle."""
    modules = []

    def kept(module):
        modules.append(module.operation.get_asm(enable_debug_info=True))
        return to_bytecode(module)

    to_bytecode = mlir.module_to_bytecode
    monkeypatch.setattr(mlir, "module_to_bytecode", kept)
    q, k, v = placed(mesh("auto", rows=2, heads=4), operands(Row())[0][1:], [ROWS_AND_HEADS] * 3)
    jax.jit(by_blocked).lower(q, k, v).compile()
    (text,) = modules
    assert "loc(" in text
    assert "jax_attn" not in text
    # From jax 0.12 on the caller compiles, and its frames are those of what is traced meanwhile.
    assert ".py" not in text or not jax.__version__.startswith("0.10.")


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_lowers_for_tpu(kind):
    shapes = [(2, 512, 4, 128)] * 3
    at = NamedSharding(mesh(kind, rows=2, heads=4), ROWS_AND_HEADS)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=at) for shape in shapes]
    attend = jax.jit(lambda *a: dot_product_attention(*a, is_causal=True))
    attend.trace(*arrays).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize(
    ("shape", "platform", "chosen"),
    [
        ((8, 4096, 8, 17), "cuda", "dense"),
        ((8, 2048, 8, 300), "tpu", "dense"),
        ((8, 2048, 8, 128), "tpu", "splash"),
    ],
)
def test_the_kernel_is_that_of_a_device_s_part(shape, platform, chosen):
    """The whole call would have 8 times as many scores."""
    at = NamedSharding(mesh("explicit", rows=2, heads=4), ROWS_AND_HEADS)
    q = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=at)
    told = explain(q, q, q)
    kernels = {each.platform: each.chosen for each in (told, *told.elsewhere)}
    assert kernels[platform] == chosen


def test_without_shardy_the_arrays_are_gathered():
    attend = partial(dot_product_attention, implementation="blocked")
    with jax.enable_x64(True):
        arrays = operands(Row())[0]
        _, *qkv = arrays
        there = placed(mesh("auto", rows=2, heads=4), qkv, [ROWS_AND_HEADS] * 3)
        jax.config.update("jax_use_shardy_partitioner", False)
        try:
            found = jax.jit(attend)(*there)
        finally:
            jax.config.update("jax_use_shardy_partitioner", True)
        assert_equal(arrays, [found], [attend(*qkv)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_length_that_is_cut_is_gathered(kind):
    with jax.enable_x64(True):
        arrays = [x[:, :8] for x in operands(Row())[0]]
        _, *qkv = arrays
        there = placed(mesh(kind, rows=2, heads=4), qkv, [P("rows", "heads")] * 3)
        found = jax.jit(lambda *a: dot_product_attention(*a, implementation="blocked"))(*there)
        assert_equal(arrays, [found], [dot_product_attention(*qkv, implementation="dense")])


# ------------------------------------------- the program for TPUs, which XLA cuts by itself


@pytest.fixture
def for_tpus(monkeypatch):
    """In meshes of Auto axes the program that a TPU gets, on CPU devices."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, tpu, default: tpu(*x))
    jax.clear_caches()  # of what was traced for CPUs
    yield
    jax.clear_caches()


# Row → whether its loops differ from row to row, so that devices ask if any has a turn left.
FOR_TPUS = {
    "both": False,
    "one key/value head": False,
    "fewer key/value heads than devices": False,
    "a bias of all": False,
    "lengths": True,
    "dropout": False,
    "a learned key, a zero and sinks": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOR_TPUS)
def test_on_tpus_equal_and_cut_without_custom_partitioning(for_tpus, name):
    row = ROWS[name]
    run = jax.jit(partial(both_passes, KERNELS["blocked"], row.options))
    with jax.enable_x64(True):
        arrays, specs = operands(row)
        there = placed(mesh("auto", rows=2, heads=4), arrays, specs)
        lowered = run.lower(*there)
        assert "CustomSPMDPartitioning" not in lowered.as_text()
        program = lowered.compile()
        found = program(*there)
        assert_equal(arrays, found, both_passes("dense", row.options, *arrays))
        assert found[0].sharding.is_equivalent_to(there[1].sharding, 4)
        wanted = {"all-reduce"} if row.sums or FOR_TPUS[name] else set()
        wanted |= {"all-gather"} if "auto" in row.whole else set()
        assert collectives(program).keys() == wanted


@pytest.mark.slow
@pytest.mark.parametrize("transform", [in_a_vmap_of_a_vmap, rematerialized, in_a_scan])
def test_transforms_on_tpus(for_tpus, transform):
    test_transforms("auto", "jit", transform)


def with_the_mesh_set(at, *qkv):
    with jax.set_mesh(at.mesh):
        return jax.jit(by_blocked, in_shardings=at).lower(*qkv)


def with_placed_keys(at, q, *kv):
    return jax.jit(by_blocked).lower(q, *placed(at.mesh, kv, [at.spec] * 2))


def with_in_shardings_alone(at, *qkv):
    return jax.jit(by_blocked, in_shardings=at).lower(*qkv)


@pytest.mark.parametrize(
    ("lower", "is_known"),
    [(with_the_mesh_set, True), (with_placed_keys, True), (with_in_shardings_alone, False)],
)
def test_what_says_that_a_program_is_for_a_mesh(for_tpus, lower, is_known):
    at = NamedSharding(mesh("auto", rows=2, heads=4), ROWS_AND_HEADS)
    text = lower(at, *draws((B, T, N, H), (B, S, N, H), (B, S, N, H))).as_text()
    assert ("CustomSPMDPartitioning" not in text) is is_known
