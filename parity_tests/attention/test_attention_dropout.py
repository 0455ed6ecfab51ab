"""Dropout of attention weights: what is handed in, what is drawn, and that it repeats."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from helpers.attention import attention_definition as definition
from helpers.attention.attention_cases import (
    KEEP,
    B,
    N,
    S,
    T,
    by_each_kernel,
    dot_product_attention,
    draw,
    one_kernel,
    value_and_gradients,
)
from jax_attn.attention import Dropout

pytestmark = [by_each_kernel, pytest.mark.filterwarnings("error")]


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
            run = functools.partial(value_and_gradients, dropout=dropout)
            for got in jax.jit(run)(cotangent, *arrays):
                assert not np.asarray(got).any()

    @pytest.mark.slow
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

    @one_kernel
    def test_is_a_pytree_with_a_static_rate(self):
        q, k, v, _ = draw(18)
        run = jax.jit(lambda dropout: dot_product_attention(q, k, v, dropout=dropout))
        for dropout in (Dropout(0.2, keep=KEEP), Dropout(0.2, key=jax.random.key(3))):
            plain = dot_product_attention(q, k, v, dropout=dropout)
            budget, _ = definition.forward_budget("float32", q, k, v, keep=KEEP | True, rate=0.2)
            assert definition.worst(run(dropout), np.asarray(plain, np.float64), budget) <= 1

    @one_kernel
    def test_keys_of_the_older_kind_serve(self):
        q, k, v, _ = draw(19)
        old, new = jax.random.PRNGKey(7), jax.random.key(7)
        assert np.array_equal(
            dot_product_attention(q, k, v, dropout=Dropout(0.5, key=old)),
            dot_product_attention(q, k, v, dropout=Dropout(0.5, key=new)),
        )
