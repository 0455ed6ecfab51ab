"""The NNX modules: four projections around attention, as torch's layers begin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers.attention import attention_definition as definition
from helpers.attention.small_attention import (
    KDIM,
    VDIM,
    B,
    D,
    H,
    K,
    N,
    S,
    T,
    build,
    by_definition,
    inputs,
    numpy_weights,
)
from jax_attn.attention import Mask
from jax_attn.nn import GroupedQueryAttention, MultiHeadAttention, MultiQueryAttention

pytestmark = pytest.mark.filterwarnings("error")

RNG = np.random.default_rng(0)
ALLOWED_BNTS = RNG.random((B, N, T, S)) < 0.6
BIAS_NTS = RNG.standard_normal((N, T, S)).astype(np.float32)


MODULES = {
    "grouped": {},
    "no biases": {"use_bias": False},
    "no output bias": {"use_out_bias": False},
    "no key bias": {"use_bias": ("q_proj", "v_proj")},
    "a query bias alone": {"use_bias": ["q_proj"], "use_out_bias": False},
    "output bias alone": {"use_bias": False, "use_out_bias": True},
    "scale and softcap": {"scale": 0.4, "softcap": 0.8},
}


@pytest.mark.parametrize("name", MODULES)
def test_the_module_is_the_definition(name):
    module, x = build(**MODULES[name]), inputs()
    told = {"mask": ALLOWED_BNTS, "bias": BIAS_NTS}
    wanted = {"allowed": ALLOWED_BNTS, "bias": BIAS_NTS}
    wanted |= {key: x for key, x in MODULES[name].items() if key in ("scale", "softcap")}
    out, budget, weights, weights_budget = by_definition(module, *x, **wanted)
    assert definition.worst(module(*x, **told), out, budget) <= 1
    got = module.attention_weights(*x[:2], **told)
    assert definition.worst(got, weights, weights_budget) <= 1
    for linear, out_bias in (("q_proj", False), ("k_proj", False), ("out_proj", True)):
        given = MODULES[name].get("use_bias", True)
        has = given if given in (True, False) else linear in given
        has = MODULES[name].get("use_out_bias", bool(given)) if out_bias else has
        assert (getattr(module, linear).bias is not None) == has


@pytest.mark.parametrize("mistake", ["query bias", "scale off by 1%", "value heads reversed"])
def test_the_check_sees_a_mistake(mistake):
    module, x = build(), inputs()
    out, budget, _, _ = by_definition(module, *x)
    if mistake == "query bias":
        module.q_proj.bias[...] = module.q_proj.bias[...].at[0, 0].add(0.1)
    elif mistake == "scale off by 1%":
        module.scale = 1.01 * H**-0.5
    else:
        module.v_proj.kernel[...] = module.v_proj.kernel[...][:, ::-1]
    assert definition.worst(module(*x), out, budget) > 10


def dtype_of(call, *x):
    return jax.eval_shape(lambda *x: call(*x), *x).dtype


def test_dtype_is_what_comes_out_whatever_comes_in():
    x = inputs(dtype="float16")
    with jax.numpy_dtype_promotion("standard"):
        assert dtype_of(build(dtype="bfloat16"), *x) == jnp.bfloat16
        assert dtype_of(build(dtype=jnp.bfloat16).attention_weights, *x[:2]) == jnp.bfloat16
        assert dtype_of(build(), *x) == jnp.float32
        halves, mixed = build(param_dtype=jnp.float16), (x[0].astype(jnp.float32), *x[1:])
        assert dtype_of(halves, *x) == jnp.float16
        assert dtype_of(halves, *mixed) == jnp.float32
        halves = build(param_dtype=jnp.float16, dtype=jnp.float32)
        assert dtype_of(halves, *x) == jnp.float32


class TestSizes:
    def test_kernels_and_biases(self):
        shapes = jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(build(), nnx.Param)))
        assert shapes == {
            "q_proj": {"kernel": (D, N, H), "bias": (N, H)},
            "k_proj": {"kernel": (KDIM, K, H), "bias": (K, H)},
            "v_proj": {"kernel": (VDIM, K, H), "bias": (K, H)},
            "out_proj": {"kernel": (N, H, D), "bias": (D,)},
        }

    @pytest.mark.slow
    def test_multi_head_and_multi_query_are_grouped_with_n_and_1(self):
        x = jnp.asarray(np.random.default_rng(3).standard_normal((B, T, 12)), jnp.float32)
        for cls, kv_heads in ((MultiHeadAttention, 3), (MultiQueryAttention, 1)):
            module = cls(12, 3, **numpy_weights())
            grouped = GroupedQueryAttention(12, 3, kv_heads, **numpy_weights())
            assert module.k_proj.kernel.shape == (12, kv_heads, 4)
            assert np.array_equal(*jax.jit(lambda x, a=module, b=grouped: (a(x), b(x)))(x))

    def test_key_defaults_to_query_and_value_to_key(self):
        module, rng = MultiHeadAttention(12, 3, **numpy_weights()), np.random.default_rng(5)
        x, y = (jnp.asarray(rng.standard_normal((B, n, 12)), jnp.float32) for n in (T, S))

        @jax.jit
        def outputs(x, y):
            given = module(x, x, x), module(x, y, y), module.attention_weights(x, x)
            return (module(x), module(x, y), module.attention_weights(x)), given

        defaults, given = outputs(x, y)
        assert all(map(np.array_equal, defaults, given))

    def test_numpy_inputs_serve(self):
        module, x = build(), inputs()
        assert np.array_equal(module(*map(np.asarray, x)), module(*x))


# Of jax's generators the one that compiles in no time, shape by shape.
RBG = jax.random.key(6, impl="rbg")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_initialised_as_torch_linear(dtype):
    @nnx.jit
    def made():
        sizes = {"kdim": 64, "vdim": 160, "head_dim": 24}
        return GroupedQueryAttention(96, 8, 4, **sizes, param_dtype=dtype, rngs=nnx.Rngs(RBG))

    module = made()
    fan_ins = {"q_proj": 96, "k_proj": 64, "v_proj": 160, "out_proj": 8 * 24}
    for name, fan_in in fan_ins.items():
        linear, bound = getattr(module, name), fan_in**-0.5
        for parameter in (linear.kernel, linear.bias):
            x = np.asarray(parameter[...], np.float64)
            assert np.abs(x).max() <= bound * (1 + definition.ROUNDOFF[dtype])
            # A uniform's variance is bound²/3, its mean 0: within five standard errors.
            assert abs(x.mean()) < 5 * bound / np.sqrt(3 * x.size)
            assert abs(x.var() / (bound**2 / 3) - 1) < 5 * np.sqrt(0.8 / x.size)
        assert not np.array_equal(linear.kernel[...].ravel()[:9], linear.bias[...].ravel()[:9])


def test_initialisers_can_be_given():
    ones = jax.nn.initializers.ones
    module = build(kernel_init=ones, bias_init=ones)
    assert all((np.asarray(x) == 1).all() for x in jax.tree.leaves(nnx.state(module)))


def test_looking_at_the_weights_does_not_change_the_output():
    module, x = build(), inputs()
    before = module(*x)
    weights = module.attention_weights(*x[:2])
    assert weights.shape == (B, N, T, S)
    assert np.array_equal(module(*x), before)


def test_an_empty_row_gives_the_output_bias():
    module, x = build(), inputs()
    out = module(*x, mask=Mask.lengths([0, 7]))
    assert np.array_equal(out[0], np.broadcast_to(module.out_proj.bias[...], (T, D)))
