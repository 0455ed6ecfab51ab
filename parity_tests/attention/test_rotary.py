"""Rotary positions: the definition, the law they obey, scalings, transforms."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import jaxprs
from helpers.attention.rotary_definition import (
    BASE,
    DIM,
    POSITIONS,
    B,
    H,
    N,
    T,
    U,
    by_definition,
    drawn,
    worst,
)
from jax_attn.attention import Rotary, rotate
from jax_attn.attention.rotary import DynamicNTK, Linear, Llama3, Yarn

pytestmark = pytest.mark.filterwarnings("error")

FORMS = {
    "half-split": Rotary(BASE),
    "interleaved": Rotary(BASE, interleaved=True),
    "half-split, partial": Rotary(BASE, DIM),
    "interleaved, partial": Rotary(BASE, DIM, interleaved=True),
}

# One program compiles sooner than its operations one by one.
jitted_rotate = jax.jit(rotate, static_argnums=2)


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

    @pytest.mark.slow
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

    @pytest.mark.slow
    def test_jit(self):
        got, want = jax.jit(self.rotated)(self.x, self.at), self.rotated(self.x, self.at)
        assert np.abs(got - want).max() < self.CLOSE

    def test_vmap_over_the_rows_is_each_row_at_its_own_length(self):
        row = jax.jit(lambda x, at: self.rotated(x[None], at)[0])
        got = jax.jit(jax.vmap(row))(self.x, self.at)
        for b in range(B):
            assert np.abs(got[b] - row(self.x[b], self.at[b])).max() < self.CLOSE

    @pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
    def test_the_largest_position_of_a_dtype_has_one_after_it(self, dtype):
        at = np.full(T, min(np.iinfo(dtype).max, 2**30 - 1), dtype)
        rotary = Rotary(BASE, scaling=DynamicNTK(2.0, 3))
        want = jitted_rotate(self.x, at.astype(np.int32), rotary)
        assert np.array_equal(jitted_rotate(self.x, at, rotary), want)

    def test_the_gradient_turns_back(self):
        rotary, given = FORMS["interleaved, partial"], drawn(B, T, N, H, seed=3)

        @jax.jit
        def pulled(x, given):
            return jax.vjp(lambda x: rotate(x, self.at, rotary), x)[1](given)[0]

        back = jitted_rotate(given, -self.at, rotary)
        # The same sines and cosines: two products and their sum, on either side.
        bound = 6 * U["float32"] * math.sqrt(2) * float(np.abs(given).max())
        assert np.abs(pulled(self.x, given) - back).max() <= bound

    @pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(0, T, N, H), (B, 0, N, H)])
def test_of_nothing_there_is_nothing(shape):
    assert rotate(np.ones(shape, np.float32), np.zeros(shape[:2], int), Rotary()).shape == shape


def test_a_rotary_can_be_a_static_argument():
    assert hash(Rotary(1e4, scaling=Yarn(4.0, 64))) == hash(Rotary(10000.0, scaling=Yarn(4, 64)))
    assert jitted_rotate(drawn(B, T, N, H), None, Rotary()).shape == (B, T, N, H)
