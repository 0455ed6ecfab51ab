"""Dropout of the NNX modules: what is handed in, what is drawn, when, and from which stream."""

import jax
import numpy as np
import pytest
from flax import nnx

from helpers.attention import attention_definition as definition
from helpers.attention.small_attention import B, D, N, S, T, build, by_definition, inputs
from jax_attn.attention import ArgumentError

pytestmark = pytest.mark.filterwarnings("error")

RNG = np.random.default_rng(0)
KEEP, OUT_KEEP = RNG.random((B, N, T, S)) < 0.7, RNG.random((B, T, D)) < 0.6
RATES = {"dropout_rate": 0.3, "out_dropout_rate": 0.4}


class TestDropout:
    @pytest.mark.slow
    def test_handed_in_masks_are_what_is_dropped(self):
        module, x = build(**RATES), inputs()
        out, budget, _, _ = by_definition(module, *x, keep=KEEP, out_keep=OUT_KEEP)
        got = module(*x, keep=KEEP, out_keep=OUT_KEEP)
        assert definition.worst(got, out, budget) <= 1

    @pytest.mark.slow
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

    @pytest.mark.slow
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
            ({}, {"keep": KEEP}, "keep: expected None, because dropout_rate is 0"),
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
