"""dot_product_attention and attention_weights do what their definition says, by each kernel."""

import attention_definition as definition
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from jaxprs import equations

from jax_attn import attention
from jax_attn.attention import Dropout, Mask, attention_weights, blocked, explain
from jax_attn.attention.tile import Sizes

pytestmark = pytest.mark.filterwarnings("error")

B, T, S, N, K, H, HV = 2, 5, 7, 6, 3, 11, 13
DTYPES = ("float16", "bfloat16", "float32", "float64")


INSISTED = {}


def dot_product_attention(*arguments, **options):
    return attention.dot_product_attention(*arguments, **INSISTED, **options)


@pytest.fixture(params=["dense", "blocked"], autouse=True)
def kernel(request, monkeypatch):
    """Every test runs with each, `blocked` in tiles that divide no axis: 2 queries by 3 keys."""
    monkeypatch.setitem(INSISTED, "implementation", request.param)
    monkeypatch.setattr(blocked, "tile_sizes", lambda call: Sizes(K=1, T=2, S=3))
    return request.param


# For what a kernel has no part in, and for whether a check sees what is wrong.
one_kernel = pytest.mark.parametrize("kernel", ["dense"], indirect=True)


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def draw(seed, dtype="float32", kv_heads=K):
    """query, key, value and a cotangent, all of them exact in dtype."""
    rng = np.random.default_rng(seed)
    shapes = (B, T, N, H), (B, S, kv_heads, H), (B, S, kv_heads, HV), (B, T, N, HV)
    return tuple(rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes)


RNG = np.random.default_rng(20)
ARRAY_TS = RNG.random((T, S)) < 0.6
ARRAY_BNTS = RNG.random((B, N, T, S)) < 0.6
ARRAY_B11S = RNG.random((B, 1, 1, S)) < 0.7
BIAS_NTS = RNG.standard_normal((N, T, S)).astype(np.float32)
BIAS_HOLES = np.where(RNG.random((B, 1, T, S)) < 0.5, -np.inf, 0.25).astype(np.float32)
BIAS_HOLES[1, 0, 3] = -np.inf
KEEP = RNG.random((B, N, T, S)) < 0.8
rows, cols = np.arange(T)[:, None], np.arange(S)[None, :]
OFFSETS, LENGTHS = np.array([-1, 3]), np.array([4, 6])
Q_SEGMENTS = np.array([[0, 0, 1, 1, 2], [1, 1, 0, 2, 2]])
KV_SEGMENTS = np.array([[0, 1, 1, 2, 2, 2, 0], [2, 2, 2, 2, 1, 1, 1]])


def per_row(x):
    return np.asarray(x).reshape(B, 1, 1, 1)


# name: what the function is told; what the definition is told.
CASES = {
    "plain": ({}, {}),
    "scale": ({"scale": 0.77}, {"scale": 0.77}),
    "softcap": ({"softcap": 0.9}, {"softcap": 0.9}),
    "causal": ({"is_causal": True}, {"allowed": cols <= rows}),
    "causal at the bottom right": ({"mask": Mask.causal(S - T)}, {"allowed": cols <= rows + S - T}),
    "causal, row by row": (
        {"mask": Mask.causal(OFFSETS)},
        {"allowed": cols <= rows + per_row(OFFSETS)},
    ),
    "window": ({"mask": Mask.window(2, 1)}, {"allowed": (rows - 2 <= cols) & (cols <= rows + 1)}),
    "window open to the right": ({"mask": Mask.window(1, None, 2)}, {"allowed": rows + 1 <= cols}),
    "lengths": ({"mask": Mask.lengths(LENGTHS)}, {"allowed": cols < per_row(LENGTHS)}),
    "segments": (
        {"mask": Mask.segments(Q_SEGMENTS, KV_SEGMENTS)},
        {"allowed": Q_SEGMENTS[:, None, :, None] == KV_SEGMENTS[:, None, None, :]},
    ),
    "array (T, S)": ({"mask": ARRAY_TS}, {"allowed": ARRAY_TS}),
    "array per head": ({"mask": ARRAY_BNTS}, {"allowed": ARRAY_BNTS}),
    "array per key": ({"mask": ARRAY_B11S}, {"allowed": ARRAY_B11S}),
    "bias (N, T, S)": ({"bias": BIAS_NTS}, {"bias": BIAS_NTS}),
    "bias of -inf": ({"bias": BIAS_HOLES}, {"bias": BIAS_HOLES}),
    "empty rows": (
        {"mask": Mask.causal(-2)},
        {"allowed": cols <= rows - 2},
    ),
    "rows emptied by mask and bias together": (
        {"mask": np.isinf(BIAS_HOLES) | ARRAY_TS, "bias": BIAS_HOLES},
        {"allowed": np.isinf(BIAS_HOLES) | ARRAY_TS, "bias": BIAS_HOLES},
    ),
    "dropout": ({"dropout": Dropout(0.2, keep=KEEP)}, {"keep": KEEP, "rate": 0.2}),
    "all at once": (
        {
            "mask": Mask.lengths(LENGTHS) & Mask.array(ARRAY_BNTS),
            "is_causal": True,
            "bias": BIAS_NTS,
            "scale": 0.5,
            "softcap": 1.5,
            "dropout": Dropout(0.2, keep=KEEP),
        },
        {
            "allowed": (cols < per_row(LENGTHS)) & ARRAY_BNTS & (cols <= rows),
            "bias": BIAS_NTS,
            "scale": 0.5,
            "softcap": 1.5,
            "keep": KEEP,
            "rate": 0.2,
        },
    ),
}
cases = pytest.mark.parametrize("name", CASES)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def without_dropout(options):
    return {k: v for k, v in options.items() if k not in ("dropout", "keep", "rate")}


def value_and_gradients(cotangent, *arrays, **options):
    """The output, and the gradients of q, k, v and of a bias added to the scores."""
    zeros = jnp.zeros((B, N, T, S), jnp.float64 if arrays[0].dtype == "float64" else jnp.float32)
    bias = options.pop("bias", None)

    def call(q, k, v, extra):
        added = extra if bias is None else extra + jnp.asarray(bias).astype(extra.dtype)
        return dot_product_attention(q, k, v, bias=added, **options)

    out, backward = jax.vjp(call, *map(jnp.asarray, arrays), zeros)
    return out, *backward(jnp.asarray(cotangent))


def check_all(dtype, run, cotangent, arrays, wanted):
    """Output and gradients of run, each within its budget."""
    out, _ = definition.attend(*arrays, **wanted)
    budget, _ = definition.forward_budget(dtype, *arrays, **wanted)
    got = run(cotangent, *arrays)
    assert got[0].dtype == dtype
    assert definition.worst(got[0], out, budget) <= 1
    wants = definition.gradients(cotangent, *arrays, **wanted)
    budgets = definition.gradient_budget(dtype, cotangent, *arrays, **wanted)
    for name, g, want, budget in zip("qkvb", got[1:], wants, budgets, strict=True):
        assert definition.worst(g, want, budget) <= 1, name


# Another kernel's output is held to the definition with its gradients; weights are no kernel's.
@one_kernel
@cases
def test_output_and_weights_are_the_definition(name):
    q, k, v, _ = draw(1)
    told, wanted = CASES[name]
    out, weights = definition.attend(q, k, v, **wanted)
    out_budget, weights_budget = definition.forward_budget("float32", q, k, v, **wanted)
    assert definition.worst(dot_product_attention(q, k, v, **told), out, out_budget) <= 1
    got = attention_weights(q, k, **without_dropout(told))
    assert definition.worst(got, weights, weights_budget) <= 1


@cases
def test_gradients_are_the_chain_rule(name):
    *arrays, cotangent = draw(2)
    told, wanted = CASES[name]

    def run(cotangent, *arrays):
        return value_and_gradients(cotangent, *arrays, **told)

    check_all("float32", run, cotangent, arrays, wanted)


@pytest.mark.parametrize(
    ("dtype", "jitted"), [("float16", False), *((dtype, True) for dtype in DTYPES)]
)
def test_every_dtype_forward_and_backward(dtype, jitted):
    told, wanted = CASES["all at once"]
    with jax.enable_x64(dtype == "float64"):
        *arrays, cotangent = draw(3, dtype)

        def run(cotangent, *arrays):
            return value_and_gradients(cotangent, *arrays, **told)

        check_all(dtype, jax.jit(run) if jitted else run, cotangent, arrays, wanted)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_query_head_n_reads_kv_head_n_over_g(kv_heads):
    *arrays, cotangent = draw(4, kv_heads=kv_heads)
    check_all("float32", value_and_gradients, cotangent, arrays, {})


MISTAKES = {
    "scale off by 1%": {"scale": 1.01 * H**-0.5},
    "causal off by one": {"mask": Mask.causal(1)},
    "mask turned round": {"mask": cols > rows},
    "bias dropped": {"bias": None},
    "softcap dropped": {"softcap": None},
    "bias scaled with the scores": {"bias": BIAS_NTS * H**-0.5},
    "dropout not rescaled": {"dropout": None},
}


@one_kernel
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_sees_a_mistake(mistake):
    q, k, v, _ = draw(5)
    told = {"mask": Mask.causal(), "bias": BIAS_NTS, "softcap": 2.0}
    wanted = {"allowed": cols <= rows, "bias": BIAS_NTS, "softcap": 2.0}
    if "dropout" in mistake:
        wanted |= {"keep": np.ones((B, N, T, S), bool), "rate": 0.1}
    out, _ = definition.attend(q, k, v, **wanted)
    budget, _ = definition.forward_budget("float32", q, k, v, **wanted)
    got = dot_product_attention(q, k, v, **(told | MISTAKES[mistake]))
    assert definition.worst(got, out, budget) > 10


@one_kernel
@pytest.mark.parametrize("branch", ["query", "key", "value"])
def test_the_check_sees_a_gradient_stopped(branch):
    *arrays, cotangent = draw(5)

    def run(cotangent, *arrays):
        def stopped(*arrays):
            cut = dict(zip(("query", "key", "value"), arrays, strict=True))
            # Half the gradient is lost, the value is not.
            cut[branch] = (cut[branch] + jax.lax.stop_gradient(cut[branch])) / 2
            return dot_product_attention(*cut.values(), bias=jnp.zeros((B, N, T, S)))

        out, backward = jax.vjp(stopped, *map(jnp.asarray, arrays))
        _, _, _, dbias = definition.gradients(cotangent, *arrays)
        return out, *backward(jnp.asarray(cotangent)), dbias

    with pytest.raises(AssertionError, match=branch[0]):
        check_all("float32", run, cotangent, arrays, {})


@one_kernel
def test_the_check_sees_tiled_heads():
    q, k, v, _ = draw(6)
    out, _ = definition.attend(q, k, v)
    budget, _ = definition.forward_budget("float32", q, k, v)
    tiled = dot_product_attention(q, jnp.tile(k, (1, 1, 2, 1)), jnp.tile(v, (1, 1, 2, 1)))
    assert definition.worst(tiled, out, budget) > 10


@pytest.mark.parametrize("name", ["empty rows", "bias of -inf"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_empty_row_is_exactly_zero_and_sends_no_gradient(name, dtype):
    told, wanted = CASES[name]
    *arrays, cotangent = draw(7, dtype)
    _, weights = definition.attend(*arrays, **wanted)
    empty_BTN = ~weights.any(axis=-1).transpose(0, 2, 1)
    assert empty_BTN.any()
    assert not empty_BTN.all()
    out, dq, dk, dv, _ = value_and_gradients(cotangent, *arrays, **told)
    assert not np.asarray(out)[empty_BTN].any()
    assert not np.asarray(dq)[empty_BTN].any()
    other = np.where(empty_BTN[..., None], np.asarray(9, dtype), cotangent)
    _, _, dk_other, dv_other, _ = value_and_gradients(other, *arrays, **told)
    assert np.array_equal(dk, dk_other)
    assert np.array_equal(dv, dv_other)


def test_nothing_is_nan_where_every_row_is_empty():
    *arrays, cotangent = draw(8)
    hidden = np.zeros((T, S), bool)
    for got in value_and_gradients(cotangent, *arrays, mask=hidden):
        assert not np.asarray(got).any()


def test_second_derivatives_pass_empty_rows():
    q, k, v, _ = draw(9)

    def total(q):
        return dot_product_attention(q, k, v, Mask.causal(-2)).sum()

    hessian_diagonal = jax.grad(lambda q: (jax.grad(total)(q) ** 2).sum())(jnp.asarray(q))
    assert np.isfinite(hessian_diagonal).all()


def test_scores_too_large_for_float16_do_not_overflow():
    q, k, v, _ = draw(10, "float16")
    q, k = q * np.float16(100), k * np.float16(100)
    out, _ = definition.attend(q, k, v)
    budget, _ = definition.forward_budget("float16", q, k, v)
    run = jax.jit(lambda *arrays: dot_product_attention(*arrays))  # by name, the other kernel's
    assert definition.worst(run(q, k, v), out, budget) <= 1


def test_float64_is_float64_throughout():
    with jax.enable_x64(True):
        q, k, v, _ = draw(11, "float64")
        out, _ = definition.attend(q, k, v)
        got = dot_product_attention(q, k, v)
        assert got.dtype == jnp.float64
        single, _ = definition.forward_budget("float32", q, k, v)
        assert definition.worst(got, out, single) < 1e-6


TRANSFORMS = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "vmap": lambda f: (
        lambda q, k, v, m: jax.vmap(f)(
            *(x[None] for x in (q, k, v)), jax.tree.map(lambda x: jnp.asarray(x)[None], m)
        )[0]
    ),
    "scan": lambda f: (
        lambda q, k, v, m: jax.lax.scan(lambda c, _: (c, f(q, k, v, m)), 0, length=1)[1][0]
    ),
    "export": lambda f: (
        lambda *a: jax.export.export(jax.jit(f), platforms=("cpu", "cuda", "tpu"))(*a).call(*a)
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_under_transforms_with_the_mask_as_an_argument(transform):
    q, k, v, _ = map(jnp.asarray, draw(12))
    mask = Mask.causal(OFFSETS) & Mask.lengths(LENGTHS) & Mask.segments(Q_SEGMENTS, KV_SEGMENTS)
    allowed = (cols <= rows + per_row(OFFSETS)) & (cols < per_row(LENGTHS))
    allowed = allowed & CASES["segments"][1]["allowed"]

    def attend(q, k, v, mask):
        return dot_product_attention(q, k, v, mask)

    if transform == "export":
        # An exported function takes arrays only.
        inner, leaves = attend, jax.tree.leaves(mask)
        structure = jax.tree.structure(mask)
        leaves = [jnp.asarray(x) for x in leaves]
        got = TRANSFORMS[transform](
            lambda q, k, v, *m: inner(q, k, v, jax.tree.unflatten(structure, m))
        )(q, k, v, *leaves)
    else:
        got = TRANSFORMS[transform](attend)(q, k, v, mask)
    out, _ = definition.attend(q, k, v, allowed=allowed)
    budget, _ = definition.forward_budget("float32", q, k, v, allowed=allowed)
    assert definition.worst(got, out, budget) <= 1


@one_kernel
@dtypes
def test_weights_come_in_the_query_dtype_and_before_dropout(dtype):
    with jax.enable_x64(dtype == "float64"):
        q, k, _, _ = draw(13, dtype)
        weights = attention_weights(q, k)
        assert weights.dtype == dtype
        slack = S * definition.ROUNDOFF[dtype]
        assert np.abs(np.asarray(weights, np.float64).sum(-1) - 1).max() <= slack


def test_kv_is_never_repeated(kernel):
    q, k, v, _ = draw(14, kv_heads=1)
    found = list(equations(jax.make_jaxpr(lambda *x: dot_product_attention(*x))(q, k, v).jaxpr))
    shapes = {variable.aval.shape for equation in found for variable in equation.outvars}
    loops = {"scan", "while"} & {equation.primitive.name for equation in found}
    assert bool(loops) == (kernel == "blocked")
    assert not {(B, S, N, H), (B, S, N, HV), (B, N, S, H), (B, N, S, HV)} & shapes


def test_precision_reaches_both_products():
    q, k, v, _ = draw(14)
    for precision in (None, jax.lax.Precision.HIGHEST):
        jaxpr = jax.make_jaxpr(
            lambda *x, precision=precision: dot_product_attention(*x, precision=precision)
        )(q, k, v)
        products = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
        want = None if precision is None else (precision, precision)
        assert [e.params["precision"] for e in products] == [want, want]


class TestDropout:
    def test_rate_0_changes_nothing(self):
        q, k, v, _ = draw(15)
        dropout = Dropout(0, key=jax.random.key(0))
        assert np.array_equal(
            dot_product_attention(q, k, v, dropout=dropout), dot_product_attention(q, k, v)
        )

    def test_rate_1_gives_zeros_and_zero_gradients(self):
        *arrays, cotangent = draw(16)
        for dropout in (Dropout(1.0, key=jax.random.key(0)), Dropout(1.0, keep=KEEP)):
            for got in value_and_gradients(cotangent, *arrays, dropout=dropout):
                assert not np.asarray(got).any()

    def test_a_key_draws_each_element_alone_and_again_the_same(self):
        q, k, v, _ = draw(17)
        rate, key = 0.3, jax.random.key(5)
        ones = jnp.ones((B, N, T, S))
        keep = np.asarray(Dropout(rate, key=key).apply(ones)) > 0
        # Element by element as it is written down: the hash of its row and its column.
        words = jax.random.bits(key, (2,), jnp.uint32)
        for b, n, t, s in ((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (1, 4, 3, 6), (0, 5, 2, 6)):
            place = jnp.array([(b * N + n) * T + t, s], jnp.uint32)
            first = int(threefry_2x32((words[0], words[1]), place)[0])
            assert keep[b, n, t, s] == (first < (1 - rate) * 2**32)
        drawn = dot_product_attention(q, k, v, dropout=Dropout(rate, key=key))
        handed = dot_product_attention(q, k, v, dropout=Dropout(rate, keep=keep))
        assert np.array_equal(drawn, handed)
        flat = keep.reshape(-1)
        # Four standard deviations of a binomial share.
        assert abs(flat.mean() - (1 - rate)) < 4 * np.sqrt(rate * (1 - rate) / flat.size)
        for lines in (keep.reshape(-1, S), keep.reshape(-1, T, S).swapaxes(1, 2).reshape(-1, T)):
            # Neither a row nor a column is dropped as one: where all its elements were drawn
            # together, the share kept in it would be 0 or 1.
            assert np.var(lines.mean(axis=1)) < 2 * rate * (1 - rate) / lines.shape[1]

    def test_is_a_pytree_with_a_static_rate(self):
        q, k, v, _ = draw(18)
        run = jax.jit(lambda dropout: dot_product_attention(q, k, v, dropout=dropout))
        for dropout in (Dropout(0.2, keep=KEEP), Dropout(0.2, key=jax.random.key(3))):
            plain = dot_product_attention(q, k, v, dropout=dropout)
            budget, _ = definition.forward_budget("float32", q, k, v, keep=KEEP | True, rate=0.2)
            assert definition.worst(run(dropout), np.asarray(plain, np.float64), budget) <= 1

    def test_keys_of_the_older_kind_serve(self):
        q, k, v, _ = draw(19)
        old, new = jax.random.PRNGKey(7), jax.random.key(7)
        assert np.array_equal(
            dot_product_attention(q, k, v, dropout=Dropout(0.5, key=old)),
            dot_product_attention(q, k, v, dropout=Dropout(0.5, key=new)),
        )


@one_kernel
class TestExplain:
    def test_says_what_runs_and_runs_nothing(self):
        abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in draw(0)[:3]]
        lengths = Mask.lengths(jax.ShapeDtypeStruct((B,), jnp.int32))
        mask = lengths & Mask.causal() & Mask.array(jax.ShapeDtypeStruct((T, S), jnp.bool))
        told = explain(*abstract, mask, bias=jax.ShapeDtypeStruct((1, S), jnp.float32))
        assert told.chosen == "dense"
        assert str(told) == repr(told)
        assert str(told).startswith("dense runs: ")
