"""Rotary positions and QK-norm on the modules, and what both refuse."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers.attention.rotary_definition import (
    BASE,
    POSITIONS,
    B,
    D,
    H,
    K,
    N,
    S,
    T,
    U,
    drawn,
)
from jax_attn.attention import ArgumentError, Rotary, rotate
from jax_attn.attention.rotary import DynamicNTK, Linear, Llama3, Yarn
from jax_attn.nn import GroupedQueryAttention

pytestmark = pytest.mark.filterwarnings("error")

PLAIN = Rotary()
# How far two float64 programs of some H·D roundings may be apart, at scores of up to 100.
CLOSE = 100 * H * D * U["float64"]


def build(**options):
    rng = np.random.default_rng(1)

    def init(key, shape, dtype):  # jax's own draws would be compiled, shape by shape
        return jnp.asarray(rng.uniform(-1, 1, shape) * D**-0.5, dtype)

    inits = {"kernel_init": init, "bias_init": init}
    options = {"head_dim": H, "rngs": nnx.Rngs(1), **inits, **options}
    return GroupedQueryAttention(D, N, K, **options)


class TestModules:
    @pytest.mark.slow
    def test_without_a_key_the_keys_are_where_the_queries_are(self):
        at = jnp.asarray(np.minimum(POSITIONS, 100), jnp.int32)

        @jax.jit
        def outputs(x):
            told = module(x, x, positions=at, key_positions=at)
            plain = module(x, positions=jnp.arange(T)), module(x, x)
            return told, module(x, positions=at), module(x), *plain

        with jax.enable_x64(True):
            module = build(rotary=Rotary(BASE), param_dtype="float64")
            told, alone, untold, *plain = outputs(drawn(B, T, D, dtype="float64"))
        assert np.abs(alone - told).max() <= CLOSE
        assert all(np.abs(untold - output).max() <= CLOSE for output in plain)
        assert np.abs(untold - told).max() > 1e-3

    @pytest.mark.parametrize("scaling", [None, DynamicNTK(2.0, 4)], ids=str)
    def test_the_last_queries_of_a_text_are_those_told_where_they_are(self, scaling):
        told = {"positions": jnp.arange(S - T, S), "key_positions": jnp.arange(S)}

        @jax.jit
        def outputs(x):
            last = x[:, -T:]
            return module(last, x, **told), module(x)[:, -T:], module(last, x)

        with jax.enable_x64(True):
            module = build(rotary=Rotary(BASE, scaling=scaling), param_dtype="float64")
            got, want, untold = outputs(drawn(B, S, D, dtype="float64"))
        assert np.abs(got - want).max() <= CLOSE
        assert np.abs(got - untold).max() > 1e-3

    @pytest.mark.slow
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
    "integers": (lambda: turned(x=jnp.ones((B, T, N, H), int)), "x: expected float32"),
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
        "DynamicNTK expects at least 4 rotated features, got 2",
    ),
    "float positions": (lambda: turned(jnp.ones(T)), "positions: expected an array of integers"),
    "positions beyond int32": (
        lambda: turned(np.array([0, 1, 2, 3, 2**32])),
        "positions: expected integers within int32, got 4294967296",
    ),
    "positions of S": (lambda: turned(jnp.arange(S)), "positions: expected (5,) or (2, 5)"),
    "no length": (lambda: turned(length=0), "length: expected an int ≥ 1"),
    "module, odd head": (
        lambda: build(head_dim=7, rotary=Rotary()),
        "GroupedQueryAttention: rotary: expected an even head_dim",
    ),
    "module, rotary": (lambda: build(rotary=True), "rotary: expected a Rotary, got bool True"),
    "module, norm": (lambda: build(qk_norm=True), "qk_norm: expected a norm"),
    "module without": (
        lambda: build()(drawn(B, T, D), positions=jnp.arange(T)),
        "positions: expected None, because the module has no rotary",
    ),
    "keys elsewhere": (
        lambda: build(rotary=Rotary())(drawn(B, T, D), key_positions=jnp.arange(T)),
        "key_positions: expected None without a key",
    ),
    "keys nowhere": (
        lambda: build(rotary=Rotary())(drawn(B, T, D), drawn(B, S, D), positions=jnp.arange(T)),
        "key_positions: expected together with positions, because a key is given",
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
