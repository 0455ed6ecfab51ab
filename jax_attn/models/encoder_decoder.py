"""An encoder and a decoder that reads it: T5 and its like.

The encoder reads the source once. The decoder's cross-attention reads keys and values that are made
of its output once, so that each new token costs one step of the decoder.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jax_attn.attention import KVCache, checks
from jax_attn.attention.annotations import AnyArray
from jax_attn.attention.broadcasting import broadcasting
from jax_attn.families.traits import BlockTraits, ModelTraits, NormTraits
from jax_attn.models import generate as generation
from jax_attn.models import inputs
from jax_attn.models.asked import How, Rows
from jax_attn.models.block import Block, Stack
from jax_attn.models.cross_attention import Memory, Source, remembered
from jax_attn.models.defaults import Defaults
from jax_attn.models.heads import VocabularyHead
from jax_attn.models.model import Origin
from jax_attn.models.norm import Norm
from jax_attn.nn.embedding import rows_of


class Decoding(NamedTuple):
    """A decoder's cache: the source that it reads, and keys and values of its own tokens."""

    source: Source
    caches: tuple[KVCache, ...]


class Decoded(NamedTuple):
    """Results of an encoder-decoder.

    Attributes:
      hidden: (B, T, D), the decoder's last hidden states.
      logits: (B, T, V); None without a head.
      source: what the decoder read; its `hidden` are the encoder's last hidden states.
      cache: the cache for the next call; None if the call had none.
    """

    hidden: Float[Array, "B T D"]
    logits: Float[Array, "B T V"] | None
    source: Source
    cache: Decoding | None = None


class NormedStack(nnx.Module):
    """A stack of blocks and the norm that follows it."""

    def __init__(self, blocks: tuple[BlockTraits, ...], norm: NormTraits | None, **options: Any):
        D = blocks[0].attention.embed_dim
        self.layers = Stack(Block(block, **options) for block in blocks)
        self.final_norm = nnx.data(None if norm is None else Norm(D, traits=norm, **options))

    def __call__(self, x: Float[Array, "B T D"], *arguments: Any, **named: Any) -> Any:
        """Return the last hidden states and the grown caches; arguments are those of `Stack`."""
        x, grown = self.layers(x, *arguments, **named)
        return x if self.final_norm is None else self.final_norm(x), grown


class EncoderDecoder(nnx.Module):
    """An encoder, a decoder and a head over the vocabulary. There is no dropout.

    `jax_attn.models.load` makes one from a checkpoint, `from_config` makes an untrained one.

    Args:
      traits: what the model computes; `traits.decoder` are the decoder's blocks.
      heads: {"lm_head": V}, or {} for a model without a head.
      dtype: dtype of the computation and of the outputs; that of the parameters by default.
      param_dtype: the parameters' dtype.
      rngs: "params" for the parameters.

    `generation` has the defaults of `generate`, which `load` reads from the checkpoint.

    Raises ArgumentError for other heads, and for traits without a decoder.
    """

    most_tokens: int | None = None
    """The most tokens that a row may have; None, because there is no table of positions."""

    def __init__(
        self,
        traits: ModelTraits,
        heads: Mapping[str, int],
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        problems = []
        if others := sorted(heads.keys() - {"lm_head"}):
            problems.append(f"heads: expected lm_head or none, got {', '.join(others)}")
        if not traits.decoder:
            problems.append("traits: expected blocks of a decoder, got none")
        checks.raise_all("EncoderDecoder", problems)
        dtype = None if dtype is None else jnp.dtype(dtype)
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        options["param_dtype"] = jnp.dtype(param_dtype)
        D, V = traits.embed_dim, traits.embedding.vocab_size
        self.embed_dim, self.embedding, self.dtype = D, traits.embedding, dtype
        self.reads = inputs.Reads.of(traits.decoder)
        self.origin: Origin | None = None
        self.generation = Defaults()
        init = jax.nn.initializers.normal(1.0)  # as torch.nn.Embedding has it
        kind = options["param_dtype"]
        self.token_embedding = nnx.Embed(V, D, embedding_init=init, param_dtype=kind, rngs=rngs)
        self.encoder = NormedStack(traits.blocks, traits.final_norm, **options)
        self.decoder = NormedStack(traits.decoder, traits.final_norm, **options)
        self.lm_head = nnx.data(
            VocabularyHead(D, heads["lm_head"], traits.lm_head, **options) if heads else None
        )

    @broadcasting
    def __call__(
        self,
        tokens: Int[AnyArray, "B S"],
        lengths: Int[AnyArray, " B"] | None = None,
        *,
        decoder_tokens: Int[AnyArray, "B T"],
        decoder_lengths: Int[AnyArray, " B"] | None = None,
        attention_mask: Int[AnyArray, "B S"] | None = None,
        decoder_attention_mask: Int[AnyArray, "B T"] | None = None,
    ) -> Decoded:
        """Compute hidden states and logits of the decoder's tokens, given the source's.

        Args:
          tokens, decoder_tokens: (B, S) and (B, T) integers below the size of the vocabulary, for
            encoder and decoder. The decoder's begin with its start token: they are the labels, one
            place later.
          lengths, decoder_lengths: (B,) integers: row b has lengths[b] ≥ 1 tokens, followed by
            padding. The outputs for padding are meaningless.
          attention_mask, decoder_attention_mask: of 0 and 1, in place of lengths: 0 for padding, on
            either side.

        Raises:
          ArgumentError: lists every problem with the arguments. Values are checked only if they are
            known; under jit, a token outside the table makes its row NaN.
        """
        rows = Rows(tokens, lengths, attention_mask)
        others = Rows(decoder_tokens, decoder_lengths, decoder_attention_mask)
        problems = self._problems(rows)
        of_decoder = self._problems(others)
        if not (problems or of_decoder) and len(tokens) != len(decoder_tokens):
            of_decoder = [
                f"tokens: expected {len(tokens)} rows as in tokens, got {len(decoder_tokens)}"
            ]
        problems += [f"decoder_{text}" for text in of_decoder]
        checks.raise_all("EncoderDecoder", problems)
        return self._decoded(others, self._encoded(rows), None)

    @broadcasting
    def encode(
        self,
        tokens: Int[AnyArray, "B S"],
        lengths: Int[AnyArray, " B"] | None = None,
        *,
        attention_mask: Int[AnyArray, "B S"] | None = None,
    ) -> Source:
        """Run the encoder; return what the decoder reads. Arguments and errors are as in a call."""
        rows = Rows(tokens, lengths, attention_mask)
        checks.raise_all("EncoderDecoder.encode", self._problems(rows))
        return self._encoded(rows)

    @broadcasting
    def decode(
        self,
        tokens: Int[AnyArray, "B T"],
        lengths: Int[AnyArray, " B"] | None = None,
        *,
        source: Source | None = None,
        attention_mask: Int[AnyArray, "B T"] | None = None,
        cache: Decoding | None = None,
    ) -> Decoded:
        """Run the decoder on its tokens.

        Args:
          tokens, lengths, attention_mask: the decoder's, as in a call. With a cache lengths count
            only these tokens, and may be 0 for a row that has ended.
          source: from `encode`; None with a cache, which has it.
          cache: from `empty_cache`, or from the output for the tokens before these.

        Raises:
          ArgumentError: lists every problem with the arguments.
        """
        rows, where = Rows(tokens, lengths, attention_mask), "EncoderDecoder.decode"
        if not isinstance(cache, Decoding | None):
            expected = "one that empty_cache or decode returned"
            checks.raise_all(where, [f"cache: expected {expected}, got {checks.summary(cache)}"])
        problems = self._problems(rows, None if cache is None else cache.caches)
        if (source is None) == (cache is None):
            which = "neither" if source is None else "both"
            problems.append(f"source, cache: expected one of them, got {which}")
        elif cache is None:
            problems += self._source_problems(source)
        checks.raise_all(where, problems)
        read: Any = source if cache is None else cache.source
        problems = []
        if (count := len(read.hidden)) != len(tokens):
            problems = [f"tokens: expected {count} rows as in the source, got {len(tokens)}"]
        checks.raise_all(where, problems)
        return self._decoded(rows, read, cache)

    def empty_cache(self, source: Source, length: int) -> Decoding:
        """Return a cache with room for `length` tokens a row of the decoder, which reads `source`.

        Raises:
          ArgumentError: the decoder is not causal, or cannot read the source.
        """
        problems = inputs.cache_problems(self.reads) + self._source_problems(source)
        checks.raise_all("EncoderDecoder.empty_cache", problems)
        batch = len(source.hidden)
        layers = self.decoder.layers
        return Decoding(source, tuple(layer.empty_cache(batch, length) for layer in layers))

    @broadcasting
    def generate(
        self,
        tokens: Int[AnyArray, "B S"],
        lengths: Int[AnyArray, " B"] | None,
        max_new_tokens: int,
        *,
        attention_mask: Int[AnyArray, "B S"] | None = None,
        **how: Unpack[How],
    ) -> Int[Array, "B max_new_tokens"]:
        """Return the decoder's tokens for each row of the source, without the start token.

        The encoder runs once. The decoder begins with the checkpoint's decoder_start_token_id, and
        generates tokens one by one through a cache. A `repetition_penalty` counts the decoder's
        tokens only, as in transformers.

        Args, results and errors are those of `Model.generate`; tokens are the source's.
        """
        rows, where = Rows(tokens, lengths, attention_mask), "EncoderDecoder.generate"
        going, wanted = generation.started_from_source(self, rows, max_new_tokens, how, where)
        return generation.all_at_once(self, wanted, going, int(max_new_tokens))

    @broadcasting
    def stream(
        self,
        tokens: Int[AnyArray, "B S"],
        lengths: Int[AnyArray, " B"] | None,
        max_new_tokens: int,
        *,
        every: int = 4,
        attention_mask: Int[AnyArray, "B S"] | None = None,
        **how: Unpack[How],
    ) -> Iterator[Int[Array, "B n"]]:
        """Return an iterator of the tokens of `generate`, `every` at a time, until all rows end."""
        rows, where = Rows(tokens, lengths, attention_mask), "EncoderDecoder.stream"
        going, wanted = generation.started_from_source(
            self, rows, max_new_tokens, how, where, every
        )
        pieces = generation.streamed(self, wanted, going, int(max_new_tokens), int(every))
        return (piece for _, piece, _ in pieces)

    @property
    def is_language_model(self) -> bool:
        """True if it has a head over the vocabulary."""
        return self.lm_head is not None

    def continued(
        self, tokens: AnyArray, lengths: AnyArray | None, cache: Decoding
    ) -> tuple[Float[Array, "B V"], Decoding]:
        """Read the next tokens; return the logits after each row's last one, and the cache."""
        out = self._decoded(Rows(tokens, lengths, None), cache.source, cache)
        assert self.lm_head is not None
        assert out.cache is not None
        last = inputs.last_states(out.hidden, lengths)  # XLA computes no other logits
        return self.lm_head(last, self._table())[:, 0], out.cache

    def _problems(self, rows: Rows, caches: tuple[KVCache, ...] | None = None) -> list[str]:
        return inputs.problems(self.embedding, self.reads, *rows, None, None, None, caches)

    def _source_problems(self, source: Any) -> list[str]:
        """Say why the decoder cannot read this."""
        if not isinstance(source, Source):
            return [f"source: expected one that encode returned, got {checks.summary(source)}"]
        own = len(self.decoder.layers), self.embed_dim
        got = len(source.memories), source.hidden.shape[-1]
        words = "one for {} layers of width {}".format
        return [] if got == own else [f"source: expected {words(*own)}, got {words(*got)}"]

    def _encoded(self, rows: Rows) -> Source:
        tokens, *padding = rows
        mask = inputs.mask(*padding)
        hidden, _ = self.encoder(rows_of(self._table(), jnp.asarray(tokens)), mask)
        memories = (remembered(layer.cross_attention, hidden) for layer in self.decoder.layers)
        return Source(hidden, tuple[Memory, ...](memories), mask)

    def _decoded(self, rows: Rows, source: Source, cache: Decoding | None) -> Decoded:
        tokens, *padding = rows
        x, caches = rows_of(self._table(), jnp.asarray(tokens)), cache and cache.caches
        hidden, grown = self.decoder(x, inputs.mask(*padding), None, caches, source=source)
        logits = None if self.lm_head is None else self.lm_head(hidden, self._table())
        return Decoded(hidden, logits, source, grown and Decoding(source, grown))

    def _table(self) -> jax.Array:
        table = self.token_embedding.embedding[...]
        return table if self.dtype is None else table.astype(self.dtype)
