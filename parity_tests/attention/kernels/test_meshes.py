"""Attention on eight devices: equal to that on one, cut as the query is, nothing sent in vain."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax._src.interpreters import mlir
from jax.sharding import NamedSharding

from helpers.attention.kernel_comparison import draws, rounding
from helpers.attention.mesh_calls import (
    KERNELS,
    ROWS,
    ROWS_AND_HEADS,
    B,
    H,
    N,
    Row,
    T,
    as_it_is,
    assert_equal,
    assert_equal_under,
    both_passes,
    by_blocked,
    in_a_scan,
    in_a_vmap,
    in_a_vmap_of_a_vmap,
    in_a_vmap_over_the_batch,
    operands,
    rematerialized,
)
from helpers.attention.meshes import KINDS, collectives, mesh, placed
from jax_attn.attention import attention_weights, dot_product_attention, explain_kernel
from jax_attn.attention.kernels.mesh.shards import Shards

pytestmark = pytest.mark.filterwarnings("error")
# In an Auto mesh XLA cuts dense by itself; in an Explicit one it is run as blocked is.
CASES = [
    *((kind, name, "blocked") for kind in KINDS for name in ROWS if name != "both"),
    *(("explicit", name, "dense") for name in ("both", "dropout", "a bias of all")),
    ("explicit", "fewer key/value heads than devices", "dense"),
    ("auto", "fewer key/value heads than devices", "dense"),
    ("auto", "dropout", "dense"),
    *((kind, "both", "the default") for kind in KINDS),
]


def passes_of(name, kernel):
    return partial(both_passes, KERNELS[kernel], ROWS[name].options)


@cache
def on_one_device(name, kernel):
    """Its programs know no mesh: both kinds share them."""
    return jax.jit(passes_of(name, kernel))(*operands(ROWS[name])[0])


@pytest.mark.parametrize(
    ("kind", "name", "kernel"),
    [
        *((kind, "both", "blocked") for kind in KINDS),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES),
    ],
)
def test_equal_to_one_device_and_cut_as_the_query(kind, name, kernel):
    row, run = ROWS[name], passes_of(name, kernel)
    with jax.enable_x64(True):
        arrays, specs = operands(row)
        there = placed(mesh(kind, rows=2, heads=4), arrays, specs)
        program = jax.jit(run).lower(*there).compile()
        found = program(*there)
        assert_equal(arrays, found, on_one_device(name, kernel))
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
    assert_equal_under(transform, kind, is_compiled=compiled == "jit")


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
        wanted = jax.jit(run)(*arrays)
        for kind in KINDS:
            there = placed(mesh(kind, rows=2, heads=4), arrays, specs)
            assert_equal(arrays, jax.jit(run)(*there), wanted)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("is_in_mesh", [False, True])
def test_no_tracer_outlives_its_trace(is_in_mesh):
    q, k, v = (x.astype(np.float32) for x in operands(Row())[0][1:])
    if is_in_mesh:
        q, k, v = placed(mesh("auto", rows=2, heads=4), (q, k, v), [ROWS_AND_HEADS] * 3)
    with jax.checking_leaks():
        jax.jit(lambda *a: dot_product_attention(*a, implementation="blocked")).lower(q, k, v)


@pytest.mark.slow
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
    told = explain_kernel(q, q, q)
    kernels = {each.platform: each.chosen for each in (told, *told.elsewhere)}
    assert kernels[platform] == chosen


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_length_that_is_cut_is_gathered(kind):
    with jax.enable_x64(True):
        arrays = [x[:, :8] for x in operands(Row())[0]]
        _, *qkv = arrays
        there = placed(mesh(kind, rows=2, heads=4), qkv, [P("rows", "heads")] * 3)
        found = jax.jit(lambda *a: dot_product_attention(*a, implementation="blocked"))(*there)
        assert_equal(arrays, [found], [dot_product_attention(*qkv, implementation="dense")])


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_dense_computes_the_queries_of_each_device_there(heads):
    """In an Auto mesh, where the length is cut: also with several queries to a key's head."""
    query = jax.ShapeDtypeStruct((2, 64, 4, 8), jnp.float32)
    key = jax.ShapeDtypeStruct((2, 64, heads, 8), jnp.float32)
    call = jax.jit(partial(dot_product_attention, implementation="dense"))
    alone = call.lower(query, key, key).compile().cost_analysis()["flops"]
    over = mesh("auto", rows=2, parts=4)
    batch, length = over.axis_names
    cut = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(over, spec)),
        (query, key),
        (P(batch, length), P(batch)),
    )
    each = call.lower(cut[0], cut[1], cut[1]).compile()
    assert each.cost_analysis()["flops"] <= 1.1 * alone / over.size
    assert each.output_shardings.spec[:2] == (batch, length)
