"""The blocked kernel under JAX's transformations: second derivatives, maps, shards, export."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.attention.kernel_comparison import (
    draws,
    example,
    in_tiles,
    rounding,
    value_and_gradients,
)
from jax_attn.attention import Dropout, Mask, dot_product_attention, explain_kernel

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.slow
def test_dropout_is_the_same_whatever_the_tiles_and_as_dense_draws_it():
    arrays, dropout = example(), Dropout(0.4, key=jax.random.key(11))
    with jax.enable_x64(True):
        wanted = value_and_gradients("dense", *arrays, dropout=dropout)
        plain = value_and_gradients("dense", *arrays)
        for kernel in (in_tiles(3, 7, 11), in_tiles(1, 2, 3)):
            made = value_and_gradients(kernel, *arrays, dropout=dropout)
            for got, want, other in zip(made, wanted, plain, strict=True):
                assert np.abs(got - want).max() <= rounding(arrays, want)
                assert np.abs(got - other).max() > rounding(arrays, want)


DEEP = {
    "causal": {"is_causal": True, "bias": draws((7, 11))[0].astype(np.float64)},
    "all at once": {
        "mask": Mask.lengths(np.array([9, 4])) & Mask.array(draws((2, 1, 7, 11))[0] < 1),
        "bias": draws((6, 1, 11), seed=1)[0].astype(np.float64),
        "softcap": 1.5,
        "dropout": Dropout(0.3, key=jax.random.key(2)),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
def test_second_derivatives_are_dense_s(name):
    options = dict(DEEP[name])
    with jax.enable_x64(True):
        arrays = [*map(jnp.asarray, example()[:3]), jnp.asarray(options.pop("bias"))]
        every = (0, 1, 2, 3)

        def penalty(implementation, *arrays):
            def loss(*arrays):
                *qkv, bias = arrays
                given = options | {"bias": bias, "implementation": implementation}
                return (dot_product_attention(*qkv, **given) ** 2).sum()

            return sum((g**2).sum() for g in jax.grad(loss, argnums=every)(*arrays))

        blocked_s, dense_s = (
            jax.jit(jax.grad(functools.partial(penalty, kernel), argnums=every))
            for kernel in (in_tiles(1, 3, 4), "dense")
        )
        rng = np.random.default_rng(3)
        moved = [x * (1 + 2.0**-53 * rng.choice([-2, 2], x.shape)) for x in arrays]
        # Each of so many additions errs as an input does that moves by its last bit.
        additions = sum(sum(x.shape) for x in arrays)
        columns = zip(blocked_s(*arrays), dense_s(*arrays), dense_s(*moved), strict=True)
        for got, want, near in columns:
            allowed = additions * np.abs(near - want).max()
            assert np.abs(got - want).max() <= allowed < np.abs(want).max()


@pytest.mark.slow
def test_second_derivatives_in_bfloat16_come_in_bfloat16():
    q, k, v, _ = (jnp.asarray(x, jnp.bfloat16) for x in example(dtype=np.float32))

    def penalty(q):
        def loss(q):
            out = dot_product_attention(q, k, v, implementation="blocked")
            return (out.astype(jnp.float32) ** 2).sum()

        return (jax.grad(loss)(q).astype(jnp.float32) ** 2).sum()

    found = jax.jit(jax.grad(penalty))(q)
    assert found.dtype == jnp.bfloat16
    assert np.isfinite(found.astype(np.float32)).all()
    assert np.asarray(found).any()


@contextlib.contextmanager
def programs_compiled():
    """A list to which every program that is compiled meanwhile is added."""
    compiled = []

    def add(event, seconds, **_):
        compiled.extend([event] * ("backend_compile" in event))

    jax.monitoring.register_event_duration_secs_listener(add)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(add)


@pytest.mark.slow
def test_an_eager_call_compiles_nothing_the_second_time():
    *arrays, cotangent = example(dtype=np.float32)

    def run(scale):
        attend = functools.partial(dot_product_attention, implementation="blocked", is_causal=True)
        _, pull = jax.vjp(attend, *(scale * x for x in arrays))
        return pull(cotangent)

    with programs_compiled() as compiled:
        run(np.float32(1))
        assert compiled
        compiled.clear()
        run(np.float32(2))
        assert not compiled


@pytest.mark.slow
def test_dense_compiles_nothing_for_another_offset():
    """As in a loop over the tokens of a text, each with an offset of its own."""
    *arrays, _ = example(T=3, S=19, dtype=np.float32)  # sizes of no other test

    def run(offset):
        dot_product_attention(*arrays, Mask.causal(offset=offset), implementation="dense")

    with programs_compiled() as compiled:
        run(1)
        assert compiled
        compiled.clear()
        run(2)
        run(3)
        assert not compiled


@pytest.mark.slow
def test_within_a_shard_map_what_is_shared_gets_the_sum_of_all_gradients():
    arrays, (bias,) = example(), draws((7, 11), dtype=np.float64, seed=1)
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    split, same = jax.sharding.PartitionSpec("batch"), jax.sharding.PartitionSpec()

    def gradients(implementation, cotangent, *shared):
        def local(q, k, v, bias):
            return dot_product_attention(q, k, v, bias=bias, implementation=implementation)

        specs = (split, split, split, same)
        over = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=split)
        return jax.vjp(over, *shared)[1](cotangent)

    *qkv, cotangent = arrays
    with jax.enable_x64(True):
        got, want = (
            jax.jit(functools.partial(gradients, name))(cotangent, *qkv, bias)
            for name in ("blocked", "dense")
        )
        for a, b in zip(got, want, strict=True):
            assert np.abs(a - b).max() <= rounding(arrays, b)


def test_sizes_that_are_not_known_yet_are_dense_s():
    b, t = jax.export.symbolic_shape("b, t")
    for shape in ((b, 256, 4, 8), (2, t, 4, 8)):
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        told = explain_kernel(x, x, x)
        assert told.chosen == "dense"
        assert "tiles need known sizes, not" in str(told)
        exported = jax.export.export(jax.jit(lambda x: dot_product_attention(x, x, x)))(x)
        assert exported.out_avals[0].shape == shape


@pytest.mark.slow
def test_vmap_over_lengths_of_their_own():
    q, k, v, cotangent = example()
    queries, lengths = np.stack([q, 2 * q]), np.array([[3, 11], [7, 0]])

    def run(implementation, q, lengths):
        mask = Mask.lengths(lengths)
        return dot_product_attention(q, k, v, mask, implementation=implementation)

    with jax.enable_x64(True):
        got = jax.jit(jax.vmap(functools.partial(run, "blocked")))(queries, lengths)
        for i in range(2):
            want = run("dense", queries[i], lengths[i])
            assert np.abs(got[i] - want).max() <= rounding((queries[i], k, v, cotangent), want)


def test_an_empty_batch_gives_an_empty_output():
    q, k, v = (jnp.ones((0, n, 2, 3)) for n in (4, 5, 5))
    assert dot_product_attention(q, k, v, implementation="blocked").shape == (0, 4, 2, 3)


THROUGH = {
    "remat": lambda loss: jax.grad(jax.checkpoint(loss)),
    "vmap": lambda loss: lambda q: jax.vmap(jax.grad(loss))(q[None])[0],
    "scan": lambda loss: lambda q: jax.lax.scan(
        lambda c, _: (c, jax.grad(loss)(q)), 0, length=1
    )[1][0],
    "export": lambda loss: jax.export.export(
        jax.jit(jax.grad(loss)), platforms=("cpu", "cuda", "tpu")
    )(jax.ShapeDtypeStruct((2, 7, 6, 5), jnp.float64)).call,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", THROUGH)
def test_gradients_come_through_transforms(name):
    arrays = q, k, v, cotangent = example()
    kernel = in_tiles(1, 3, 4)

    def loss(q):
        out = dot_product_attention(q, k, v, is_causal=True, implementation=kernel)
        return (out * cotangent).sum()

    with jax.enable_x64(True):
        want = value_and_gradients("dense", *arrays, is_causal=True)[1]
        got = jax.jit(THROUGH[name](loss))(jnp.asarray(q))
        assert np.abs(got - want).max() <= rounding(arrays, want) < np.abs(want).max()
