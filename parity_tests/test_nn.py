"""The NNX modules: four projections around attention, under every transform."""

import attention_definition as definition
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_attn.attention import ArgumentError, Mask
from jax_attn.nn import (
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiQueryAttention,
    SentenceAttention,
    encode_sentence,
    simple_tokenizer,
)

pytestmark = pytest.mark.filterwarnings("error")

B, T, S, N, K, H, D, KDIM, VDIM = 2, 5, 7, 6, 3, 11, 13, 17, 19
DTYPES = ("float16", "bfloat16", "float32", "float64")
RNG = np.random.default_rng(0)
KEEP, OUT_KEEP = RNG.random((B, N, T, S)) < 0.7, RNG.random((B, T, D)) < 0.6
ALLOWED_BNTS = RNG.random((B, N, T, S)) < 0.6
BIAS_NTS = RNG.standard_normal((N, T, S)).astype(np.float32)


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def build(**options):
    options = {"head_dim": H, "kdim": KDIM, "vdim": VDIM, "rngs": nnx.Rngs(1), **options}
    return GroupedQueryAttention(D, N, K, **options)


def inputs(seed=2, dtype="float32"):
    rng = np.random.default_rng(seed)
    shapes = (B, T, D), (B, S, KDIM), (B, S, VDIM)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def by_definition(module, query, key, value, keep=None, out_keep=None, **options):
    """Output, weights and their budgets, from the module's parameters in float64.

    The budget: attention's own for its inputs, which the projections have put off by
    (√fan_in + 2)·u of their magnitude; then out_proj's of its.
    """
    dtype = str(module.q_proj.kernel.dtype)
    u = definition.ROUNDOFF[dtype]

    def project(name, x, features, size=np.asarray, shifted=True):
        linear = getattr(module, name)
        kernel = size(np.asarray(linear.kernel[...], np.float64)).reshape(x.shape[-1], -1)
        out = (size(x) @ kernel).reshape(*x.shape[:-1], *features)
        if linear.bias is None or not shifted:
            return out
        return out + size(np.asarray(linear.bias[...], np.float64))

    plan = ("q_proj", query, (N, H)), ("k_proj", key, (K, H)), ("v_proj", value, (K, H))
    plan = [(name, np.asarray(x, np.float64), features) for name, x, features in plan]
    q, k, v = (project(*step) for step in plan)
    off = max(np.sqrt(x.shape[-1]) + 2 for _, x, _ in plan)
    worst = [project(*step, size=np.abs).max() for step in plan]
    options = {**options, "keep": keep, "rate": module.dropout_rate if keep is not None else 0.0}
    attended, weights = definition.attend(q, k, v, **options)
    budget, weights_budget = definition.forward_budget(dtype, q, k, v, **options)
    scale = H**-0.5 if module.scale is None else module.scale
    # |q|·|k| summed over H, each off by off·u: a score is off by that, a weight by twice that.
    drift = 4 * off * u * scale * H * worst[0] * worst[1]
    budget = budget + drift * definition.attend(q, k, np.abs(v), **options)[0] + off * u * worst[2]
    out = project("out_proj", attended.reshape(B, T, N * H), (D,))
    budget = budget.reshape(B, T, N * H)
    out_budget = project("out_proj", budget, (D,), size=np.abs, shifted=False)
    magnitude = project("out_proj", np.abs(attended).reshape(B, T, N * H), (D,), size=np.abs)
    out_budget = out_budget + (np.sqrt(N * H) + 3) * u * magnitude
    if out_keep is not None:
        kept = out_keep / (1 - module.out_dropout_rate)
        out, out_budget = out * kept, out_budget * kept + 1e-30
    return out, out_budget, weights, weights_budget + drift * weights


MODULES = {
    "grouped": {},
    "no biases": {"use_bias": False},
    "no output bias": {"use_out_bias": False},
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
        has = MODULES[name].get("use_bias", True)
        has = MODULES[name].get("use_out_bias", has) if out_bias else has
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


@pytest.mark.parametrize(
    ("dtype", "jitted"), [("float16", False), *((dtype, True) for dtype in DTYPES)]
)
def test_every_dtype(dtype, jitted):
    def causal(module, *x):
        return module(*x, is_causal=True)

    with jax.enable_x64(dtype == "float64"):
        module, x = build(param_dtype=dtype), inputs(dtype=dtype)
        out, budget, _, _ = by_definition(module, *x, allowed=np.tri(T, S, dtype=bool))
        got = nnx.jit(causal)(module, *x) if jitted else causal(module, *x)
        assert got.dtype == dtype
        assert definition.worst(got, out, budget) <= 1


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

    def test_multi_head_and_multi_query_are_grouped_with_n_and_1(self):
        x = jnp.asarray(np.random.default_rng(3).standard_normal((B, T, 12)), jnp.float32)
        for cls, kv_heads in ((MultiHeadAttention, 3), (MultiQueryAttention, 1)):
            module = cls(12, 3, rngs=nnx.Rngs(4))
            grouped = GroupedQueryAttention(12, 3, kv_heads, rngs=nnx.Rngs(4))
            assert module.k_proj.kernel.shape == (12, kv_heads, 4)
            assert np.array_equal(module(x), grouped(x))

    def test_key_defaults_to_query_and_value_to_key(self):
        module = MultiHeadAttention(12, 3, rngs=nnx.Rngs(4))
        rng = np.random.default_rng(5)
        x, y = (jnp.asarray(rng.standard_normal((B, n, 12)), jnp.float32) for n in (T, S))
        assert np.array_equal(module(x), module(x, x, x))
        assert np.array_equal(module(x, y), module(x, y, y))
        assert np.array_equal(module.attention_weights(x), module.attention_weights(x, x))

    def test_numpy_inputs_serve(self):
        module, x = build(), inputs()
        assert np.array_equal(module(*map(np.asarray, x)), module(*x))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_initialised_as_torch_linear(dtype):
    module = GroupedQueryAttention(
        96, 8, 4, kdim=64, vdim=160, head_dim=24, param_dtype=dtype, rngs=nnx.Rngs(6)
    )
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


RATES = {"dropout_rate": 0.3, "out_dropout_rate": 0.4}


class TestDropout:
    def test_handed_in_masks_are_what_is_dropped(self):
        module, x = build(**RATES), inputs()
        out, budget, _, _ = by_definition(module, *x, keep=KEEP, out_keep=OUT_KEEP)
        got = module(*x, keep=KEEP, out_keep=OUT_KEEP)
        assert definition.worst(got, out, budget) <= 1

    def test_train_and_eval_switch_and_the_call_overrules(self):
        module, plain, x = build(**RATES), build(), inputs()
        want = plain(*x)
        assert not np.array_equal(module(*x), want)
        assert np.array_equal(module(*x, deterministic=True), want)
        module.eval()
        assert np.array_equal(module(*x), want)
        assert not np.array_equal(module(*x, deterministic=False), want)
        module.train()
        assert not np.array_equal(module(*x), want)

    def test_each_call_draws_anew_and_a_stream_given_draws_the_same_again(self):
        module, x = build(**RATES), inputs()
        assert not np.array_equal(module(*x), module(*x))
        one, two = (module(*x, rngs=nnx.Rngs(dropout=9)) for _ in range(2))
        assert np.array_equal(one, two)
        stream = nnx.Rngs(dropout=9).dropout
        assert np.array_equal(module(*x, rngs=stream), one)

    def test_weights_are_those_before_dropout(self):
        module, plain, x = build(**RATES), build(), inputs()
        weights = module.attention_weights(*x[:2])
        assert np.array_equal(weights, plain.attention_weights(*x[:2]))

    def test_no_dropout_keeps_no_stream(self):
        assert not jax.tree.leaves(nnx.state(build(), nnx.RngState))
        assert jax.tree.leaves(nnx.state(build(dropout_rate=0.1), nnx.RngState))

    def test_draws_under_nnx_jit_and_grad(self):
        module, x = build(**RATES), inputs()
        step = nnx.jit(nnx.grad(lambda m, x: m(*x).sum()))
        one, two = step(module, x), step(module, x)
        assert not np.array_equal(one["v_proj"]["kernel"][...], two["v_proj"]["kernel"][...])

    def test_without_a_stream_it_says_what_to_pass(self):
        module, x = build(**RATES, rngs=nnx.Rngs(params=0)), inputs()
        says = r"(?s)dropout_rate is 0.3 .*rngs=nnx.Rngs\(dropout=….*keep=.*out_keep="
        with pytest.raises(ArgumentError, match=says):
            module(*x)
        with pytest.raises(ArgumentError, match="got Rngs"):
            module(*x, rngs=nnx.Rngs(params=0))
        assert module(*x, deterministic=True).shape == (B, T, D)
        assert module(*x, keep=KEEP, out_keep=OUT_KEEP).shape == (B, T, D)

    @pytest.mark.parametrize(
        ("options", "call", "says"),
        [
            ({}, {"keep": KEEP}, "keep: expected None, as dropout_rate is 0"),
            (RATES, {"out_keep": OUT_KEEP, "deterministic": True}, "out_keep: .* deterministic"),
            (RATES, {"keep": KEEP[..., 1:]}, "dropout.keep: expected a shape that broadcasts"),
            (RATES, {"out_keep": OUT_KEEP[:, 1:]}, r"out_keep: .*\(B, T, D\) = \(2, 5, 13\)"),
            (RATES, {"out_keep": OUT_KEEP * 1}, "keep: expected a boolean array"),
            (RATES, {"deterministic": 1}, "deterministic: expected a static Python bool"),
        ],
    )
    def test_masks_that_do_not_fit_are_told(self, options, call, says):
        with pytest.raises(ArgumentError, match=says):
            build(**options)(*inputs(), **call)


def split_state(run):
    """run(module, x) as a jax function of the module's state."""

    def call(module, x):
        graph, state = nnx.split(module)
        return run(lambda state, x: nnx.merge(graph, state)(*x, Mask.lengths(LENGTHS)))(state, x)

    return call


def exported(f):
    platforms = ("cpu", "cuda", "tpu")

    # The state is a pytree of its own kind: an exported function takes plain leaves.
    def call(state, x):
        leaves, structure = jax.tree.flatten((state, x))
        flat = jax.jit(lambda *leaves: f(*jax.tree.unflatten(structure, leaves)))
        return jax.export.export(flat, platforms=platforms)(*leaves).call(*leaves)

    return call


LENGTHS = np.array([4, 6])
TRANSFORMS = {
    "nnx.jit": lambda m, x: nnx.jit(lambda m, x, mask: m(*x, mask))(m, x, Mask.lengths(LENGTHS)),
    "nnx.remat": lambda m, x: nnx.remat(lambda m, x: m(*x, Mask.lengths(LENGTHS)))(m, x),
    "nnx.vmap": lambda m, x: nnx.vmap(
        lambda m, x, n: m(*x, Mask.lengths(n)), in_axes=(None, 1, 0), out_axes=1
    )(m, [y[:, None] for y in x], jnp.asarray(LENGTHS)[None])[:, 0],
    "jax.jit on split state": split_state(jax.jit),
    "jax.checkpoint on split state": split_state(jax.checkpoint),
    "jax.vmap over a batch of states": split_state(
        lambda f: (
            lambda state, x: jax.vmap(f, in_axes=(0, None))(
                jax.tree.map(lambda p: jnp.stack([p, p]), state), x
            )[1]
        )
    ),
    "jax.export on split state": split_state(exported),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_transforms(name):
    module, x = build(), inputs()
    allowed = np.arange(S) < LENGTHS.reshape(B, 1, 1, 1)
    out, budget, _, _ = by_definition(module, *x, allowed=allowed)
    assert definition.worst(TRANSFORMS[name](module, x), out, budget) <= 1


def test_gradients_are_finite_differences_in_float64():
    with jax.enable_x64(True):
        module, x = build(param_dtype="float64", softcap=1.5), inputs(dtype="float64")
        graph, state = nnx.split(module)

        def loss(state, x):
            return (nnx.merge(graph, state)(*x, mask=Mask.causal(-1)) ** 2).sum()

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))(state, x)
        through_nnx = nnx.grad(lambda m, x: (m(*x, mask=Mask.causal(-1)) ** 2).sum())(module, x)
        for a, b in zip(jax.tree.leaves(gradient[0]), jax.tree.leaves(through_nnx), strict=True):
            # Both are the chain rule in float64; jit may sum in another order.
            assert np.abs(a - b).max() <= 1e3 * definition.ROUNDOFF["float64"] * np.abs(a).max()
        run = jax.jit(loss)
        rng = np.random.default_rng(7)
        for leaf in range(len(jax.tree.leaves((state, x)))):
            leaves, structure = jax.tree.flatten((state, x))
            direction, step = rng.standard_normal(leaves[leaf].shape), 1e-5

            def at(t, leaves=leaves, leaf=leaf, direction=direction, structure=structure):
                moved = [*leaves[:leaf], leaves[leaf] + t * direction, *leaves[leaf + 1 :]]
                return float(run(*jax.tree.unflatten(structure, moved)))

            want = (at(step) - at(-step)) / (2 * step)
            got = float((jax.tree.leaves(gradient)[leaf] * direction).sum())
            # Truncation step²·f''' and rounding u·f/step, a hundredfold each.
            slack = 100 * (step**2 + definition.ROUNDOFF["float64"] / step) * abs(at(0))
            assert abs(got - want) <= slack


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


CONSTRUCTOR = {
    "embed_dim not by heads": ({"embed_dim": 14}, "embed_dim: .*multiple of num_heads=6.*got 14"),
    "heads not by kv heads": ({"num_kv_heads": 4}, "num_heads: .*num_kv_heads=4, got 6"),
    "no heads": ({"num_heads": 0}, "num_heads: expected an int ≥ 1, got int 0"),
    "negative heads": ({"num_kv_heads": -2}, "num_kv_heads: expected an int ≥ 1, got int -2"),
    "heads of True": ({"num_heads": True}, "num_heads: expected an int ≥ 1, got bool True"),
    "heads of a float": ({"num_heads": 6.0}, "num_heads: expected an int ≥ 1, got float 6.0"),
    "embed_dim of 0": ({"embed_dim": 0}, "embed_dim: expected an int ≥ 1"),
    "head_dim of 0": ({"head_dim": 0}, "head_dim: expected an int ≥ 1"),
    "kdim of a string": ({"kdim": "7"}, "kdim: expected an int ≥ 1, got str '7'"),
    "vdim of -1": ({"vdim": -1}, "vdim: expected an int ≥ 1"),
    "dropout of 1.5": ({"dropout_rate": 1.5}, r"dropout_rate: expected a number in \[0, 1\]"),
    "out_dropout of -1": ({"out_dropout_rate": -1}, "out_dropout_rate: expected a number in"),
    "float64 without x64": ({"dtype": "float64"}, "dtype: float64 needs x64"),
    "float64 parameters": ({"param_dtype": np.float64}, "param_dtype: float64 needs x64"),
    "integer dtype": ({"dtype": "int32"}, "dtype: expected float16, .*got dtype int32"),
    "no dtype": ({"param_dtype": "floaty"}, "param_dtype: expected float16, .*got dtype 'floaty'"),
    "softcap of 0": ({"softcap": 0}, "softcap: expected a finite plain number > 0"),
    "scale of infinity": ({"scale": float("inf")}, "scale: expected a finite plain number"),
    "unknown kernel": ({"implementation": "flash"}, "implementation: expected None or one of"),
    "a seed for rngs": ({"rngs": 0}, "rngs: expected nnx.Rngs, got int"),
}


@pytest.mark.parametrize("name", CONSTRUCTOR)
def test_the_constructor_refuses(name):
    changed, says = CONSTRUCTOR[name]
    good = {"embed_dim": 12, "num_heads": 6, "num_kv_heads": 3, "rngs": nnx.Rngs(0)}
    with pytest.raises(ArgumentError, match=says) as error:
        GroupedQueryAttention(**{**good, **changed})
    assert str(error.value).startswith("GroupedQueryAttention")


def test_the_constructor_tells_every_problem_at_once():
    with pytest.raises(ArgumentError, match="6 problems") as error:
        MultiQueryAttention(
            0, 2.5, dropout_rate=2, out_dropout_rate=-1, kdim=0, dtype="int8", rngs=nnx.Rngs(0)
        )
    for argument in ("embed_dim", "num_heads", "dropout_rate", "out_dropout_rate", "kdim", "dtype"):
        assert f"- {argument}: " in str(error.value)


X = np.ones((B, T, 12), np.float32)
CALLS = {
    "features": ([X[..., 1:]], {}, "query: expected embed_dim = 12 features, got float32"),
    "rank": ([X[0]], {}, r"query: expected rank 3 \(B, T, embed_dim\), got float32\[5, 12\]"),
    "no queries": ([X[:, :0]], {}, "query: expected T ≥ 1"),
    "integers": ([X.astype(int)], {}, "query: expected float16.*got dtype int64"),
    "float64": ([X.astype(np.float64)], {}, "query: float64 needs x64"),
    "batch": ([X, np.ones((3, S, 12), np.float32)], {}, "query, key, value: expected one B"),
    "lengths": ([X, X, X[:, 1:]], {}, "key, value: expected one S"),
    "a list": ([[1.0]], {}, "query: expected a NumPy or JAX array, got list"),
    "mask of rank 3": ([X], {"mask": np.ones((B, T, T), bool)}, "mask: .* both as"),
    "is_causal": ([X], {"is_causal": 1}, "is_causal: expected a static Python bool"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_call_refuses(name):
    arrays, options, says = CALLS[name]
    module = MultiHeadAttention(12, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentError, match=says):
        module(*arrays, **options)


def test_a_key_that_must_be_given_is_named():
    with pytest.raises(
        ArgumentError, match=r"key: expected kdim = 17 .*\(query, as none was given"
    ):
        build()(inputs()[0])


class TestPipeline:
    def test_tokens(self):
        assert simple_tokenizer("This is AN example sentence") == [1, 2, 3, 4, 5]
        assert simple_tokenizer("  an unknown\tword ") == [3, 0, 0]
        assert simple_tokenizer("") == []

    @pytest.mark.parametrize(
        ("sentence", "max_len", "want"),
        [
            ("this is an example sentence", 10, [1, 2, 3, 4, 5, 0, 0, 0, 0, 0]),
            ("this is an example sentence", 3, [1, 2, 3]),
            ("", 2, [0, 0]),
        ],
    )
    def test_encoding_cuts_and_fills(self, sentence, max_len, want):
        got = encode_sentence(sentence, simple_tokenizer, max_len)
        assert (got.dtype, got.tolist()) == (jnp.int32, want)

    def test_a_length_of_0_is_told(self):
        with pytest.raises(ArgumentError, match="max_len: expected an int ≥ 1, got int 0"):
            encode_sentence("this", simple_tokenizer, 0)

    def test_is_embedding_then_attention(self):
        pipeline = SentenceAttention(6, 12, 3, rngs=nnx.Rngs(8))
        tokens = encode_sentence("this is an example sentence")[None]
        out = pipeline(tokens, is_causal=True)
        assert out.shape == (1, 10, 12)
        embedded = pipeline.embedding.embedding[...][tokens]
        assert np.array_equal(out, pipeline.attention(embedded, is_causal=True))
        jitted = nnx.jit(lambda m, tokens: m(tokens))(pipeline, tokens)
        assert jitted.shape == out.shape

    def test_embedding_is_standard_normal(self):
        table = SentenceAttention(97, 96, 3, rngs=nnx.Rngs(9)).embedding.embedding[...]
        # Five standard errors of a mean and of a variance of 97·96 normal draws.
        assert abs(table.mean()) < 5 / np.sqrt(table.size)
        assert abs(table.var() - 1) < 5 * np.sqrt(2 / table.size)

    @pytest.mark.parametrize("tokens", [np.ones((1, 3), np.float32), np.ones(3, int), [1, 2]])
    def test_what_is_no_token_array_is_told(self, tokens):
        with pytest.raises(ArgumentError, match="tokens: expected"):
            SentenceAttention(6, 12, 3, rngs=nnx.Rngs(8))(tokens)
