"""Forward mode through kernels whose backward pass is their own: dense's numbers in any nesting."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.attention.kernel_comparison import draws, in_tiles
from helpers.jaxprs import shapes
from jax_attn.attention import Mask, dot_product_attention
from jax_attn.attention.kernels import forward_mode

pytestmark = pytest.mark.filterwarnings("error")

T, S = 5, 7
Q, K, V, D_Q, BIAS = draws(
    (2, T, 4, 3), (2, S, 2, 3), (2, S, 2, 3), (2, T, 4, 3), (4, 1, S), dtype=np.float64
)
SCALES = np.array([1.0, -0.5, 2.0])


def attend(kernel, q, k=K, bias=BIAS):
    mask = Mask.lengths(jnp.array([S - 1, 3]))
    return dot_product_attention(q, k, V, mask, bias=bias, implementation=kernel)


def loss(kernel, q, k=K, bias=BIAS):
    return (attend(kernel, q, k, bias) ** 2).sum()


def scaled(kernel):
    """A function of three numbers, whose Jacobians are small."""
    return lambda scales: loss(kernel, Q * scales, K * scales[::-1])


def moved(fn, *at):
    """The derivative of fn along D_Q."""

    def along(q):
        d_q = jnp.asarray(D_Q)
        return jax.jvp(fn, (jnp.asarray(q), *at), (d_q, *(0.5 * x for x in at)))[1]

    return along


def over_devices(kernel):
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    split, same = jax.sharding.PartitionSpec("batch"), jax.sharding.PartitionSpec()

    def local(q, bias, k, v):
        return dot_product_attention(q, k, v, bias=bias, implementation=kernel)

    over = jax.shard_map(local, mesh=mesh, in_specs=(split, same, split, split), out_specs=split)
    return lambda q, bias: over(*map(jnp.asarray, (q, bias, K, V)))


# Of a kernel; each is one program, which compiles sooner than its operations one by one.
DERIVATIVES = {
    "jvp": lambda of: moved(functools.partial(attend, of))(Q),
    "jvp by a bias too": lambda of: moved(lambda q, b: attend(of, q, K, b), BIAS)(Q),
    "jvp of jit": lambda of: moved(jax.jit(functools.partial(attend, of)))(Q),
    "jacfwd": lambda of: jax.jacfwd(scaled(of))(SCALES),
    "hessian": lambda of: jax.hessian(scaled(of))(SCALES),
    "jacfwd of jacfwd": lambda of: jax.jacfwd(jax.jacfwd(scaled(of)))(SCALES),
    "gradient of jvp": lambda of: jax.grad(lambda q: moved(functools.partial(loss, of))(q))(Q),
    "gradient of a gradient's gradient": lambda of: jax.grad(
        lambda q: moved(jax.grad(functools.partial(loss, of)))(q).sum()
    )(Q),
    "under vmap": lambda of: jax.vmap(moved(functools.partial(attend, of)))(jnp.stack([Q, D_Q])),
    "gradient of vmap": lambda of: jax.grad(
        lambda k: jax.vmap(lambda q: loss(of, q, k), in_axes=2)(np.stack([Q, D_Q], 2)).sum()
    )(K),
    "remat": lambda of: moved(jax.grad(jax.checkpoint(functools.partial(loss, of))))(Q),
    "over devices": lambda of: moved(over_devices(of), jnp.asarray(BIAS))(jnp.asarray(Q)),
    "over devices, of a gradient": lambda of: moved(
        jax.grad(lambda q, b: (over_devices(of)(q, b) ** 2).sum(), argnums=1), jnp.asarray(BIAS)
    )(jnp.asarray(Q)),
}


def apart(got, want) -> float:
    """In units of the largest number's roundoff, for each of so many terms and derivatives."""
    allowed = 2.0**-53 * (T + S) * 4 * 3 * 32 * np.abs(want).max()
    return float(np.abs(got - want).max() / allowed)


# Each a nesting that another one holds.
REPEATED = ("jvp", "jacfwd", "gradient of jvp", "over devices")


def pytest_generate_tests(metafunc):
    """All of them with --long."""
    if "name" in metafunc.fixturenames:
        left_out = () if metafunc.config.getoption("--long") else REPEATED
        metafunc.parametrize("name", [name for name in DERIVATIVES if name not in left_out])


@pytest.mark.slow
def test_derivatives_are_dense_s(name):
    with jax.enable_x64(True):
        got, want = (
            jax.jit(functools.partial(DERIVATIVES[name], kernel))()
            for kernel in (in_tiles(1, 3, 4), "dense")
        )
    assert np.abs(want).max() > 0
    assert apart(got, want) <= 1


@pytest.mark.slow
def test_the_comparison_sees_a_tangent_that_is_wrong(monkeypatch):
    pushed = forward_mode.pushed

    def mistaken(run, call, outputs, d_floats):
        return pushed(run, call, outputs, d_floats | {"key": 2 * d_floats["key"]})

    tiled = in_tiles(1, 3, 4)
    with jax.enable_x64(True):
        want = jax.jit(lambda: DERIVATIVES["jvp"]("dense"))()
        assert apart(DERIVATIVES["jvp"](tiled), want) <= 1  # eager: op by op
        monkeypatch.setattr(forward_mode, "pushed", mistaken)
        got, want = (jax.jit(lambda of=of: DERIVATIVES["jacfwd"](of))() for of in (tiled, "dense"))
        assert apart(got, want) > 1


@pytest.mark.slow
def test_the_kernels_of_every_platform_have_it():
    """Where dense, blocked and splash are chosen, each for another platform."""
    q, k, v, d_q = draws((1, 130, 1, 2), (1, 131, 1, 2), (1, 131, 1, 2), (1, 130, 1, 2))

    @functools.partial(jax.jit, static_argnums=0)
    def second(name, q):
        def total(q):
            return (dot_product_attention(q, k, v, implementation=name) ** 2).sum()

        return jax.jvp(jax.grad(total), (q,), (d_q,))[1]

    got, want = second(None, q), second("dense", q)
    assert apart(got, want) <= 2.0**29  # float32's roundoff, in float64's


def test_reverse_mode_stays_blocked_and_forward_mode_is_written_out():
    n = 1031
    q, k, v = (jax.ShapeDtypeStruct((1, n, 1, 4), jnp.float32) for _ in range(3))

    def total(q, k, v):
        return dot_product_attention(q, k, v, implementation="blocked").sum()

    def written_out(fn, *args):
        return any(shape[-2:] == (n, n) for shape in shapes(jax.make_jaxpr(fn)(*args).jaxpr))

    assert not written_out(jax.grad(total, argnums=(0, 1, 2)), q, k, v)
    assert not written_out(jax.jit(jax.grad(total)), q, k, v)
    assert written_out(jax.grad(lambda *a: jax.grad(total)(*a).sum()), q, k, v)
