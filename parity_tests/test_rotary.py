"""Rotary positions and QK-norm: the definition, the law they obey, and how modules take them."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from flax import nnx

from jax_attn.attention import ArgumentError, Rotary, rotate
from jax_attn.attention.rotary import DynamicNTK, Linear, Llama3, Yarn
from jax_attn.nn import GroupedQueryAttention

pytestmark = pytest.mark.filterwarnings("error")

B, T, S, N, K, H, DIM, D = 2, 5, 11, 6, 3, 14, 10, 13
BASE = 100.0
U = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
PLAIN = Rotary()
POSITIONS = np.array([[0, 1, 7, 40, 2**20], [3, 2, 5, 1, 0]])
FORMS = {
    "half-split": Rotary(BASE),
    "interleaved": Rotary(BASE, interleaved=True),
    "half-split, partial": Rotary(BASE, DIM),
    "interleaved, partial": Rotary(BASE, DIM, interleaved=True),
}


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def drawn(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


# One program compiles sooner than its operations one by one.
jitted_rotate = jax.jit(rotate, static_argnums=2)


def by_definition(x_BTNH, positions, rotary, frequencies=None):
    """Pairs as complex numbers, times exp(i · position · frequency); and their magnitudes."""
    x = np.array(x_BTNH, np.float64)
    dim = x.shape[-1] if rotary.dim is None else rotary.dim
    m = np.arange(dim // 2)
    frequencies = rotary.base ** (-2 * m / dim) if frequencies is None else frequencies
    real, imaginary = (2 * m, 2 * m + 1) if rotary.interleaved else (m, m + dim // 2)
    angles = np.broadcast_to(positions, x.shape[:2])[..., None, None] * frequencies
    z = (x[..., real] + 1j * x[..., imaginary]) * np.exp(1j * angles)
    size = np.abs(x)
    out = x.copy()
    out[..., real], out[..., imaginary] = z.real, z.imag
    size[..., real] = size[..., imaginary] = np.abs(z)
    return out, size


def worst(got, want, budget):
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape
    return float(np.where(np.isfinite(got), np.abs(got - want) / budget, np.inf).max())


@functools.cache
def definition_in(dtype, form):
    """x, what it must become and by how much it may be off.

    A pair errs by u of its size in each of cosine, sine, two products and their sum, here 6u, and
    by once the rounding to the dtype. The angles are those of frequencies in the dtype of the
    arithmetic, but a position of 2²⁰ times a frequency is rounded, too: by u of the angle.
    """
    rotary = FORMS[form]
    with jax.enable_x64(dtype == "float64"):
        x = drawn(B, T, N, H, dtype=dtype)
    wide = "float64" if dtype == "float64" else "float32"
    frequencies, _ = rotary.frequencies(rotary.dim or H, np.dtype(wide), 1)
    out, size = by_definition(x, POSITIONS, rotary, frequencies.astype(np.float64))
    u = U[wide]
    rounded = (0 if dtype == wide else U[dtype]) * np.abs(out)
    # Features that stay are exact, but a budget has to be above 0.
    return x, out, size * u * (6 + POSITIONS[..., None, None]) + rounded + 1e-30


@pytest.mark.parametrize(
    ("dtype", "form"),
    [("float32", form) for form in FORMS]
    + [(dtype, form) for dtype in U if dtype != "float32" for form in (*FORMS,)[::3]],
)
def test_rotate_is_the_turn_of_complex_numbers_rounded_once(dtype, form):
    x, out, budget = definition_in(dtype, form)
    with jax.enable_x64(dtype == "float64"):
        got = jitted_rotate(x, jnp.asarray(POSITIONS, jnp.int32), FORMS[form])
        assert got.dtype == dtype
        assert worst(got, out, budget) <= 1
        dim = FORMS[form].dim or H
        assert np.array_equal(got[..., dim:], x[..., dim:])


MISTAKES = {
    "the other convention": lambda x, at: rotate(x, at, Rotary(BASE, interleaved=True)),
    "all of a partial head": lambda x, at: rotate(x, at, Rotary(BASE, DIM)),
    "a position too far": lambda x, at: rotate(x, at + 1, Rotary(BASE)),
    "the other way round": lambda x, at: rotate(x, -at, Rotary(BASE)),
    "another base": lambda x, at: rotate(x, at, Rotary(1.001 * BASE)),
    "in bfloat16": lambda x, at: rotate(x.astype(jnp.bfloat16), at, Rotary(BASE)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_sees_a_mistake(mistake):
    x, out, budget = definition_in("float32", "half-split")
    got = MISTAKES[mistake](x, jnp.asarray(POSITIONS, jnp.int32))
    assert worst(got[:, :4], out[:, :4], budget[:, :4]) > 10


def test_frequencies_are_float64s_rounded_but_for_the_exponents_rounding():
    """A power and a reciprocal are rounded, and the exponent e, which counts e·ln(base)."""
    dim, base = 128, 5e5
    got, growth = Rotary(base).frequencies(dim, np.dtype("float32"), 1)
    exponents = np.arange(0, dim, 2) / dim
    budget = U["float32"] * (3 + exponents * math.log(base))
    assert got.dtype == np.float32
    assert growth == 1
    assert (np.abs(got * base**exponents - 1) <= budget).all()


class TestLaw:
    """The score of a query at i and a key at j depends on j − i alone."""

    SCALINGS = (None, Linear(4.0), Llama3(8.0, 1.0, 4.0, 64), Yarn(4.0, 64))

    def scores(self, rotary, q_at, k_at, length=None):
        q, k = drawn(1, T, 1, H, dtype="float64"), drawn(1, T, 1, H, dtype="float64", seed=1)
        q = rotate(q, jnp.asarray(q_at), rotary, length=length)
        k = rotate(k, jnp.asarray(k_at), rotary, length=length)
        return np.einsum("bthd,bthd->t", q, k)

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("scaling", SCALINGS, ids=str)
    def test_a_shift_of_both_changes_nothing(self, scaling, interleaved):
        rotary, far = Rotary(BASE, DIM, interleaved, scaling), 1009
        i, j = np.arange(T), np.array([3, 0, 4, 1, 9])
        with jax.enable_x64(True):
            near = self.scores(rotary, i, j)
            shifted = self.scores(rotary, i + far, j + far)
            one = self.scores(rotary, i + 1, j)
        # Angles up to `far` are off by far·u, the scores, of a size of H, by H times that.
        bound = 4 * H * far * U["float64"]
        assert np.abs(near - shifted).max() <= bound
        assert np.abs(near - one).max() > 1e6 * bound

    def test_dynamic_ntk_obeys_it_at_one_length_only(self):
        rotary, at = Rotary(BASE, scaling=DynamicNTK(2.0, 8)), np.arange(T)
        with jax.enable_x64(True):
            fixed = [self.scores(rotary, at + n, at + n + 3, length=50) for n in (0, 40)]
            own = [self.scores(rotary, at + n, at + n + 3) for n in (0, 40)]
        assert np.abs(fixed[0] - fixed[1]).max() <= 4 * H * 50 * U["float64"]
        assert np.abs(own[0] - own[1]).max() > 1e-3


LENGTH = 512
# So near to 1 that a factor of 1 + OFF slows no pair, and so large beside its rounding that its
# logarithm is OFF, to within U/OFF of it.
OFF = 1e-9
SCALED = {
    # (scaling, from frequencies and turns in LENGTH to the share that is left, growth), from the
    # papers. Yarn's ramp over pairs is one over the logarithm of their turns.
    "linear": (Linear(4.0), lambda f, turns: 1 / 4, 1),
    "llama 3": (
        Llama3(8.0, 2.0, 16.0, LENGTH),
        lambda f, turns: np.interp(turns, [2, 16], [1 / 8, 1]),
        1,
    ),
    "yarn": (
        Yarn(4.0, LENGTH, truncate=False),
        lambda f, turns: np.interp(np.log(turns), np.log([1, 32]), [1 / 4, 1]),
        0.1 * math.log(4) + 1,
    ),
    "yarn of given growth": (Yarn(1.0, LENGTH, attention_factor=1.5), lambda f, turns: 1, 1.5),
    "yarn of two scales": (
        Yarn(1 + OFF, LENGTH, mscale=0.7 / OFF, mscale_all_dim=0.3 / OFF),
        lambda f, turns: 1,
        pytest.approx((0.07 + 1) / (0.03 + 1), rel=OFF + U["float64"] / OFF),
    ),
    "dynamic, within its length": (DynamicNTK(4.0, LENGTH), lambda f, turns: 1, 1),
    "dynamic, at twice its length": (
        DynamicNTK(4.0, LENGTH // 2),
        lambda f, turns: (4.0 * 2 - 3) ** (np.log(f) / np.log(BASE) * H / (H - 2)),
        1,
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_scaling_slows_each_pair_as_its_paper_says(name):
    scaling, share, growth = SCALED[name]
    plain = BASE ** (-np.arange(0, H, 2) / H)
    turns = LENGTH * plain / (2 * np.pi)
    with jax.enable_x64(True):
        got, grown = Rotary(BASE, scaling=scaling).frequencies(H, np.dtype("float64"), LENGTH)
    assert grown == growth
    # A power errs by some units for each e-fold of it, BASE at most; and one factor is not quite 1.
    rtol = OFF + 8 * np.log(BASE) * U["float64"]
    np.testing.assert_allclose(got, plain * share(plain, turns), rtol=rtol, atol=0)


class TestTransforms:
    rotary = Rotary(BASE, DIM, scaling=DynamicNTK(2.0, 3))
    x, at = drawn(B, T, N, H), jnp.asarray(np.minimum(POSITIONS, 100), jnp.int32)

    def rotated(self, x, at):
        return rotate(x, at, self.rotary)

    # A power may be off by some units in the last place, which an angle of 100 multiplies.
    CLOSE = 8 * 100 * U["float32"] * float(jnp.abs(x).max())

    def test_jit(self):
        got, want = jax.jit(self.rotated)(self.x, self.at), self.rotated(self.x, self.at)
        assert np.abs(got - want).max() < self.CLOSE

    def test_vmap_over_the_rows_is_each_row_at_its_own_length(self):
        row = jax.vmap(lambda x, at: self.rotated(x[None], at)[0])
        got = jax.jit(row)(self.x, self.at)
        for b in range(B):
            want = self.rotated(self.x[b : b + 1], self.at[b])[0]
            assert np.abs(got[b] - want).max() < self.CLOSE

    def test_the_gradient_turns_back(self):
        rotary, given = FORMS["interleaved, partial"], drawn(B, T, N, H, seed=3)
        _, pull = jax.vjp(lambda x: rotate(x, self.at, rotary), self.x)
        assert np.abs(pull(given)[0] - rotate(given, -self.at, rotary)).max() < 1e-6

    def test_exported_with_symbolic_sizes_it_serves_other_sizes(self):
        b, t = jax.export.symbolic_shape("b, t")
        shapes = (
            jax.ShapeDtypeStruct((b, t, N, H), jnp.float32),
            jax.ShapeDtypeStruct((b, t), jnp.int32),
        )
        exported = jax.export.export(jax.jit(self.rotated))(*shapes)
        got = exported.call(self.x, self.at)
        assert np.abs(got - self.rotated(self.x, self.at)).max() < self.CLOSE
        alone = jax.export.export(jax.jit(lambda x: self.rotated(x, None)))(shapes[0])
        assert np.abs(alone.call(self.x) - self.rotated(self.x, None)).max() < self.CLOSE

    def test_nothing_is_gathered_or_multiplied_by_a_matrix(self):
        for rotary in FORMS.values():
            jaxpr = jax.make_jaxpr(lambda x, at, r=rotary: rotate(x, at, r))(self.x, self.at)
            names = {equation.primitive.name for equation in jaxprs.equations(jaxpr.jaxpr)}
            assert {"cos", "mul"} <= names
            assert not names & {"gather", "dot_general", "scatter"}


def build(**options):
    rng = np.random.default_rng(1)

    def init(key, shape, dtype):  # jax's own draws would be compiled, shape by shape
        return jnp.asarray(rng.uniform(-1, 1, shape) * D**-0.5, dtype)

    inits = {"kernel_init": init, "bias_init": init}
    options = {"head_dim": H, "rngs": nnx.Rngs(1), **inits, **options}
    return GroupedQueryAttention(D, N, K, **options)


NORMS = {
    "RMSNorm": functools.partial(nnx.RMSNorm, epsilon=0.1),
    "LayerNorm": functools.partial(nnx.LayerNorm, epsilon=0.1, use_fast_variance=False),
}


def normalised(module, name, x):
    """Over the last axis, from the statistics."""
    norm = getattr(module, name)
    off = x - x.mean(-1, keepdims=True) if isinstance(norm, nnx.LayerNorm) else x
    x = off / np.sqrt(np.square(off).mean(-1, keepdims=True) + 0.1) * np.asarray(norm.scale[...])
    return x + np.asarray(norm.bias[...]) if isinstance(norm, nnx.LayerNorm) else x


class TestModules:
    @pytest.mark.parametrize("name", NORMS)
    def test_projected_then_normalised_then_rotated(self, name):
        rotary = Rotary(BASE, DIM)
        with jax.enable_x64(True):
            module = build(qk_norm=NORMS[name], rotary=rotary, param_dtype="float64")
            for seed, norm in enumerate((module.q_norm, module.k_norm)):
                norm.scale[...] = drawn(H, dtype="float64", seed=seed)
            x = drawn(B, T, D, dtype="float64")
            at = np.minimum(POSITIONS, 100)
            heads = []
            for projection, norm in (("q_proj", "q_norm"), ("k_proj", "k_norm")):
                linear = getattr(module, projection)
                made = np.einsum("btd,dnh->btnh", x, linear.kernel[...]) + linear.bias[...]
                heads.append(by_definition(normalised(module, norm, made), at, rotary)[0])
            q, k = heads
            scores = np.einsum("btkgh,bskh->bkgts", q.reshape(B, T, K, N // K, H), k) / H**0.5
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights = (weights / weights.sum(-1, keepdims=True)).reshape(B, N, T, T)
            got = jax.jit(lambda x: module.attention_weights(x, positions=at))(x)
            # Two float64 programs of some H·D roundings, at scores of up to 100.
            assert np.abs(got - weights).max() <= 100 * H * D * U["float64"]
            wrong = jax.jit(lambda x: module.attention_weights(x, positions=at * 2))(x)
            assert np.abs(wrong - weights).max() > 1e-3

    def test_without_a_key_the_keys_are_where_the_queries_are(self):
        module, x = build(rotary=Rotary(BASE)), drawn(B, T, D)
        at = jnp.asarray(np.minimum(POSITIONS, 100), jnp.int32)
        told = module(x, x, positions=at, key_positions=at)
        assert np.array_equal(module(x, positions=at), told)
        assert np.array_equal(module(x), module(x, positions=jnp.arange(T)))
        assert np.array_equal(module(x), module(x, x))
        assert np.abs(module(x) - told).max() > 1e-3

    @pytest.mark.parametrize("scaling", [None, DynamicNTK(2.0, 4)], ids=str)
    def test_the_last_queries_of_a_text_are_those_told_where_they_are(self, scaling):
        module, x = build(rotary=Rotary(BASE, scaling=scaling)), drawn(B, S, D)
        told = {"positions": jnp.arange(S - T, S), "key_positions": jnp.arange(S)}

        @jax.jit
        def outputs(x):
            last = x[:, -T:]
            return module(last, x, **told), module(x)[:, -T:], module(last, x)

        got, want, untold = outputs(x)
        assert np.abs(got - want).max() < 1e-5
        assert np.abs(got - untold).max() > 1e-3

    @pytest.mark.parametrize("name", NORMS)
    def test_bfloat16_stays_bfloat16_under_strict_promotion(self, name):
        module = build(qk_norm=NORMS[name], rotary=Rotary(BASE), param_dtype="bfloat16")
        x = drawn(B, T, D, dtype="bfloat16")
        wide = build(qk_norm=NORMS[name], rotary=Rotary(BASE))
        weights = jax.jit(lambda x: wide.attention_weights(x))
        nnx.update(wide, jax.tree.map(lambda a: a.astype("float32"), nnx.state(module, nnx.Param)))
        got, want = jax.jit(module.attention_weights)(x), weights(x.astype("float32"))
        assert got.dtype == jnp.bfloat16
        # Scores up to √H of two heads rounded thrice; a weight by twice that, and once itself.
        budget = (2 * H**0.5 * 6 + 1) * U["bfloat16"] * np.float64(want)
        assert worst(got, np.float64(want), budget) <= 1
        assert worst(weights(2 - x.astype("float32")), np.float64(want), budget) > 1

    def test_the_norms_are_drawn_last_so_that_the_others_stay(self):
        with_norm, without = build(qk_norm=nnx.RMSNorm), build()
        assert np.array_equal(with_norm.out_proj.kernel[...], without.out_proj.kernel[...])
        assert without.q_norm is None


REFUSED = {
    "base": (lambda: Rotary(base=1), "base: expected a finite number > 1, got int 1"),
    "dim": (lambda: Rotary(dim=3), "dim: expected an even int ≥ 2, or None, got int 3"),
    "interleaved": (lambda: Rotary(interleaved=1), "interleaved: expected True or False"),
    "scaling": (lambda: Rotary(scaling="yarn"), "scaling: expected Linear, DynamicNTK"),
    "factor": (lambda: Linear(0.5), "Linear: factor: expected a finite number ≥ 1, got float 0.5"),
    "length": (lambda: DynamicNTK(2, 1.5), "DynamicNTK: original_length: expected an int ≥ 1"),
    "frequencies": (
        lambda: Llama3(8, 4, 4, 64),
        "low_freq_factor: expected less than high_freq_factor, got 4 and 4",
    ),
    "betas": (lambda: Yarn(4, 64, beta_fast=1), "beta_slow: expected less than beta_fast"),
    "several": (lambda: Yarn(0, 0, truncate=None), "Yarn: 3 problems"),
    "x": (lambda: rotate(drawn(T, N, H), None, Rotary()), "x: expected rank 4"),
    "integers": (lambda: turned(x=jnp.ones((B, T, N, H), int)), "x: expected float16"),
    "rotary": (lambda: turned(rotary=None), "rotary: expected a Rotary, got NoneType None"),
    "too wide": (
        lambda: turned(rotary=Rotary(dim=16)),
        "expected dim ≤ head_dim = 14, got dim = 16",
    ),
    "odd head": (
        lambda: rotate(drawn(B, T, N, 7), None, Rotary()),
        "rotary: expected an even head_dim, or a dim, got head_dim = 7",
    ),
    "narrow": (
        lambda: turned(rotary=Rotary(dim=2, scaling=DynamicNTK(2, 8))),
        "DynamicNTK expects at least 4 features to turn, got 2",
    ),
    "float positions": (lambda: turned(jnp.ones(T)), "positions: expected an array of integers"),
    "positions of S": (lambda: turned(jnp.arange(S)), "positions: expected (5,) or (2, 5)"),
    "no length": (lambda: turned(length=0), "length: expected an int ≥ 1"),
    "module, odd head": (
        lambda: build(head_dim=7, rotary=Rotary()),
        "GroupedQueryAttention: rotary: expected an even head_dim",
    ),
    "module, rotary": (lambda: build(rotary=True), "rotary: expected a Rotary, got bool True"),
    "module, norm": (lambda: build(qk_norm=True), "qk_norm: expected what makes a norm"),
    "module without": (
        lambda: build()(drawn(B, T, D), positions=jnp.arange(T)),
        "positions: expected None, as the module has no rotary",
    ),
    "keys elsewhere": (
        lambda: build(rotary=Rotary())(drawn(B, T, D), key_positions=jnp.arange(T)),
        "key_positions: expected None, as no key is given",
    ),
    "keys nowhere": (
        lambda: build(rotary=Rotary())(drawn(B, T, D), drawn(B, S, D), positions=jnp.arange(T)),
        "key_positions: expected together with positions, as a key is given",
    ),
    "weights, too": (
        lambda: build(rotary=Rotary()).attention_weights(drawn(B, T, D), positions=jnp.arange(S)),
        "positions: expected (5,) or (2, 5), one for each step, got int32[11]",
    ),
}


def turned(positions=None, x=None, rotary=PLAIN, **options):
    return rotate(drawn(B, T, N, H) if x is None else x, positions, rotary, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    call, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=re.escape(message)):
        call()


def test_a_rotary_can_be_a_static_argument():
    assert hash(Rotary(1e4, scaling=Yarn(4.0, 64))) == hash(Rotary(10000.0, scaling=Yarn(4, 64)))
    assert jitted_rotate(drawn(B, T, N, H), None, Rotary()).shape == (B, T, N, H)
