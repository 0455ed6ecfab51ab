"""Tokens, an embedding and attention: the pipeline of the plainest design."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_attn.attention import ArgumentError
from jax_attn.nn import SentenceAttention, encode_sentence, simple_tokenizer

pytestmark = pytest.mark.filterwarnings("error")

# Of jax's generators the one that compiles in no time, shape by shape.
RBG = jax.random.key(8, impl="rbg")


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
        pipeline = SentenceAttention(6, 12, 3, rngs=nnx.Rngs(RBG))
        tokens = encode_sentence("this is an example sentence")[None]

        @nnx.jit
        def outputs(pipeline, tokens):
            embedded = pipeline.embedding.embedding[...][tokens]
            attended = pipeline.attention(embedded, is_causal=True)
            return pipeline(tokens, is_causal=True), attended, pipeline(tokens)

        causal, attended, plain = outputs(pipeline, tokens)
        assert causal.shape == (1, 10, 12)
        assert np.array_equal(causal, attended)
        assert not np.array_equal(causal, plain)

    def test_embedding_is_standard_normal(self):
        table = SentenceAttention(97, 96, 3, rngs=nnx.Rngs(RBG)).embedding.embedding[...]
        # Five standard errors of a mean and of a variance of 97·96 normal draws.
        assert abs(table.mean()) < 5 / np.sqrt(table.size)
        assert abs(table.var() - 1) < 5 * np.sqrt(2 / table.size)

    @pytest.mark.parametrize("tokens", [np.ones((1, 3), np.float32), np.ones(3, int), [1, 2]])
    def test_what_is_no_token_array_is_told(self, tokens):
        with pytest.raises(ArgumentError, match="tokens: expected"):
            SentenceAttention(6, 12, 3, rngs=nnx.Rngs(RBG))(tokens)
