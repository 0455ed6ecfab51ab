"""A whole model: embedding, a stack of blocks, a norm, heads.

One class serves all families: its `ModelTraits`, which a family reads from a config, say what the
model computes.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jax_attn.attention import KVCache, checks
from jax_attn.attention.annotations import AnyArray
from jax_attn.attention.broadcasting import broadcasting
from jax_attn.families.traits import ClassifierTraits, ModelTraits, NormTraits
from jax_attn.models import generate as generation
from jax_attn.models import inputs, packing
from jax_attn.models.asked import How, Rows
from jax_attn.models.block import Block, Stack
from jax_attn.models.defaults import Defaults
from jax_attn.models.heads import Classifier, VocabularyHead
from jax_attn.models.mlp import dense
from jax_attn.models.norm import Norm
from jax_attn.nn.arguments import Positions
from jax_attn.nn.embedding import rows_of

_EACH = ClassifierTraits("each")


@dataclass(frozen=True)
class Origin:
    """Source of a model. config: its JSON text. keys: the file's torch keys, () without a file.

    generation: the JSON text of its generation_config.json, null without one.
    """

    config: str
    keys: tuple[str, ...] = ()
    generation: str = "null"


HEADS = ("classifier", "token_classifier", "qa_outputs", "lm_head")
"""Heads that can compute `Output.logits`; the first that is present does."""
PARTS = (*HEADS, "pooler", "seq_relationship")
"""All parts that may follow the stack."""


class Output(NamedTuple):
    """Results of a model.

    Attributes:
      hidden: (B, T, D), or of the token table's width if there is an output projection (OPT).
      logits: (B, T, V) of a language model, (B, C) or (B, T, C) of a classifier; None without a
        head.
      pooled: (B, D), the first place's state through a dense layer and tanh; None without pooler.
      pair: (B, 2), whether the second of two sentences follows the first; None without such a head.
      cache: the cache for the next call; None if the call had none.
    """

    hidden: Float[Array, "B T D"]
    logits: Float[Array, "B *T C"] | None
    pooled: Float[Array, "B D"] | None = None
    pair: Float[Array, "B 2"] | None = None
    cache: tuple[KVCache, ...] | None = None


class Model(nnx.Module):
    """A model with these traits. There is no dropout, so `train()` and `eval()` change nothing.

    `jax_attn.models.load` makes one from a checkpoint, `from_config` makes an untrained one.

    Args:
      traits: what the model computes.
      heads: the heads of the model, among `PARTS`, and the number of outputs of each.
      dtype: dtype of the computation and of the outputs; that of the parameters by default.
      param_dtype: the parameters' dtype.
      rngs: "params" for the parameters.

    `generation` has the defaults of `generate`, which `load` reads from the checkpoint.

    Raises ArgumentError for heads that read a pooler's output without a pooler.
    """

    def __init__(
        self,
        traits: ModelTraits,
        heads: Mapping[str, int],
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if lacks_pooler(heads, traits.classifier):
            text = f"heads: expected a pooler, which a head reads, got {', '.join(heads)}"
            checks.raise_all("Model", [text])
        dtype = None if dtype is None else jnp.dtype(dtype)
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        options["param_dtype"] = jnp.dtype(param_dtype)
        D, embedding = traits.embed_dim, traits.embedding
        width, positions = embedding.width, embedding.positions
        self.embed_dim, self.embedding, self.dtype = D, embedding, dtype
        self.classes, self.reads = traits.classifier, inputs.Reads.of(traits.blocks)
        self.origin: Origin | None = None
        self.generation = Defaults()

        def table(rows: int, features: int) -> nnx.Embed:
            init = jax.nn.initializers.normal(1.0)  # as torch.nn.Embedding has it
            kind = jnp.dtype(param_dtype)
            return nnx.Embed(rows, features, embedding_init=init, param_dtype=kind, rngs=rngs)

        def bridge(fan_in: int, fan_out: int) -> nnx.Module | None:
            same = fan_in == fan_out
            return nnx.data(None if same else dense(fan_in, fan_out, use_bias=False, **options))

        def norm(features: int, of: NormTraits | None) -> nnx.Module | None:
            return nnx.data(None if of is None else Norm(features, traits=of, **options))

        self.token_embedding = table(embedding.vocab_size, width)
        self.embedding_projection = bridge(width, D)
        self.position_embedding = nnx.data(table(positions.rows, D) if positions else None)
        self.type_embedding = nnx.data(table(embedding.types, D) if embedding.types else None)
        self.embedding_norm = norm(D, embedding.norm)
        self.layers = Stack(Block(block, **options) for block in traits.blocks)
        self.final_norm = norm(D, traits.final_norm)
        self.output_projection = bridge(D, width)

        def head(name: str, of: ClassifierTraits | None = None) -> nnx.Module | None:
            if name not in heads:
                return nnx.data(None)
            if of is None:
                return nnx.data(dense(D, heads[name], use_bias=True, **options))
            return nnx.data(Classifier(width, heads[name], of, **options))

        self.pooler = head("pooler")
        self.seq_relationship = head("seq_relationship")
        self.classifier = head("classifier", traits.classifier)
        self.token_classifier = head("token_classifier", _EACH)
        self.qa_outputs = head("qa_outputs", _EACH)
        self.lm_head = nnx.data(
            VocabularyHead(width, heads["lm_head"], traits.lm_head, **options)
            if "lm_head" in heads
            else None
        )

    @broadcasting
    def __call__(
        self,
        tokens: Int[AnyArray, "B T"],
        lengths: Int[AnyArray, " B"] | None = None,
        *,
        attention_mask: Int[AnyArray, "B T"] | None = None,
        types: Int[AnyArray, "B T"] | None = None,
        positions: Positions | None = None,
        segments: Int[AnyArray, "B T"] | None = None,
        cache: tuple[KVCache, ...] | None = None,
    ) -> Output:
        """Compute hidden states and logits.

        Args:
          tokens: (B, T) integers below the size of the vocabulary.
          lengths: (B,) integers: row b has lengths[b] ≥ 1 tokens, followed by padding. With a cache
            it may be 0, for a row that has ended. The outputs for padding, and for such a row, are
            meaningless.
          attention_mask: (B, T) of 0 and 1, in place of lengths: 0 for padding, on either side.
          types: (B, T) token types, 0 unless given.
          positions: (T,) or (B, T); by default those that transformers computes from the same
            arguments: for most models 0 … T − 1, including padding in front. Positions that begin
            again need segments.
          segments: (B, T) integers, the text to which each token belongs, for rows of several
            texts, one behind the other: a token sees its own text alone. Positions then begin again
            with each text, unless given. An id that comes again is an error, or another text if
            that is not known, as under jit. Zeros say that each row is one text, whatever its
            positions.
          cache: from `empty_cache`, or from the output for the tokens before these. Lengths then
            count only these tokens.

        Returns:
          An `Output`. Its dtype is the model's, or its parameters'.

        Raises:
          ArgumentError: lists every problem with the arguments. Values are checked only if they are
            known; under jit, a token outside the table makes its row NaN, and so do positions that
            begin again without segments.
        """
        given = tokens, lengths, attention_mask, types, positions, segments, cache
        problems = inputs.problems(self.embedding, self.reads, *given)
        if one_answer := self._heads_with_one_answer():
            why = f"{', '.join(one_answer)} would answer for the first or last text of a row only"
            problems += packing.several_text_problems(segments, why)
        checks.raise_all("Model", problems)
        tokens, segments = jnp.asarray(tokens), packing.each_apart(segments)
        filled_B = None if cache is None else cache[0].filled
        x = self._embedded(tokens, lengths, attention_mask, types, positions, segments, filled_B)
        mask = inputs.mask(lengths, attention_mask, segments)
        bias: Any = self.reads.alibi
        if bias is not None and cache is None:
            bias = inputs.alibi_bias(bias, tokens.shape[1], attention_mask, segments)
        if positions is None and segments is not None:
            positions = inputs.places(tokens.shape[1], segments)
        x, grown = self.layers(x, mask, positions, cache, bias)
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.output_projection is not None:
            x = self.output_projection(x)
        pooled = None if self.pooler is None else jnp.tanh(self.pooler(x[:, 0]))
        pair = None if self.seq_relationship is None else self.seq_relationship(pooled)
        last_B = inputs.last_places(self.classes.pad, tokens, lengths, attention_mask)
        logits = None
        for name in HEADS:
            if logits is None and (head := getattr(self, name)) is not None:
                read = (self._table(),) if name == "lm_head" else (pooled, last_B)
                logits = head(x, *read)
        return Output(x, logits, pooled, pair, grown)

    def empty_cache(self, batch: int, length: int) -> tuple[KVCache, ...]:
        """Return an empty cache for each layer, with room for `length` tokens a row.

        A layer with a shorter window keeps only that many.

        Raises:
          ArgumentError: the model is not causal, or its rotary frequencies depend on the length.
        """
        checks.raise_all("Model.empty_cache", inputs.cache_problems(self.reads))
        return tuple(layer.empty_cache(batch, length) for layer in self.layers)

    @broadcasting
    def generate(
        self,
        tokens: Int[AnyArray, "B T"],
        lengths: Int[AnyArray, " B"] | None,
        max_new_tokens: int,
        *,
        attention_mask: Int[AnyArray, "B T"] | None = None,
        **how: Unpack[How],
    ) -> Int[Array, "B max_new_tokens"]:
        """Return the tokens that follow each row, generated one by one through a cache.

        One program reads the prompt, and one goes on. They are compiled again for another number of
        rows, another bucket (16, 24, 32, 48, … tokens) of the prompt or of the whole text, a number
        that was None, or another `eos_token_id` or `choose`.

        Args:
          tokens: (B, T) integers below the size of the vocabulary.
          lengths: (B,) integers: row b has lengths[b] tokens, followed by padding. None if there
            is no padding.
          max_new_tokens: how many tokens to add to each row.
          attention_mask: (B, T) of 0 and 1, in place of lengths: 0 for padding, on either side.
          how: how tokens are chosen, and which end a row: see `How`.

        Returns:
          (B, max_new_tokens) int32; -1 if the logits are NaN, as they are after a token outside the
          table, and under jit after the end of a table of positions.

        Raises:
          ArgumentError: lists every problem with the arguments; also for a model that has no cache,
            see `empty_cache`, or another head than a language model's.
        """
        rows = Rows(tokens, lengths, attention_mask)
        going, wanted = generation.started(self, rows, max_new_tokens, how, "Model.generate")
        return generation.all_at_once(self, wanted, going, int(max_new_tokens))

    @broadcasting
    def stream(
        self,
        tokens: Int[AnyArray, "B T"],
        lengths: Int[AnyArray, " B"] | None,
        max_new_tokens: int,
        *,
        every: int = 4,
        attention_mask: Int[AnyArray, "B T"] | None = None,
        **how: Unpack[How],
    ) -> Iterator[Int[Array, "B n"]]:
        """Return an iterator of the tokens of `generate`, `every` at a time, until all rows end."""
        rows, where = Rows(tokens, lengths, attention_mask), "Model.stream"
        going, wanted = generation.started(self, rows, max_new_tokens, how, where, every)
        pieces = generation.streamed(self, wanted, going, int(max_new_tokens), int(every))
        return (piece for _, piece, _ in pieces)

    @property
    def is_language_model(self) -> bool:
        """True if its only head is one over the vocabulary."""
        return [name for name in HEADS if getattr(self, name) is not None] == ["lm_head"]

    @property
    def most_tokens(self) -> int | None:
        """The most tokens that a row may have, by the table of positions; None without a table."""
        positions = self.embedding.positions
        return None if positions is None else inputs.longest(positions)

    def continued(
        self, tokens: AnyArray, lengths: AnyArray | None, cache: tuple[KVCache, ...]
    ) -> tuple[Float[Array, "B V"], tuple[KVCache, ...]]:
        """Read the next tokens; return the logits after each row's last one, and the cache."""
        out = self(tokens, lengths, cache=cache)
        assert self.lm_head is not None
        assert out.cache is not None
        last = inputs.last_states(out.hidden, lengths)  # XLA computes no other logits
        return self.lm_head(last, self._table())[:, 0], out.cache

    def _heads_with_one_answer(self) -> list[str]:
        """Return the names of the heads that have one answer for a whole row."""
        names = [name for name in ("pooler", "seq_relationship") if getattr(self, name) is not None]
        has_answer = self.classifier is not None and self.classes.reads != "each"
        return [*names, *["classifier"] * has_answer]

    def _table(self) -> jax.Array:
        table = self.token_embedding.embedding[...]
        return table if self.dtype is None else table.astype(self.dtype)

    def _embedded(
        self,
        tokens: jax.Array,
        lengths: AnyArray | None,
        attention_mask: AnyArray | None,
        types: AnyArray | None,
        positions: AnyArray | None,
        segments: AnyArray | None,
        filled_B: jax.Array | None,
    ) -> jax.Array:
        """Return the vectors (B, T, D) that the first block reads."""
        traits = self.embedding
        given = positions, lengths, attention_mask, segments
        read = packing.as_one_text(tokens, *given, is_causal=self.reads.is_causal)
        x = rows_of(self._table(), read, traits.pad)
        if traits.scale != 1.0:
            x = x * jnp.asarray(traits.scale, x.dtype)
        if self.embedding_projection is not None:
            x = self.embedding_projection(x)
        if self.type_embedding is not None:
            types = jnp.zeros_like(tokens) if types is None else jnp.asarray(types)
            x = x + rows_of(self.type_embedding.embedding[...].astype(x.dtype), types)
        if self.position_embedding is not None and traits.positions is not None:
            rows = inputs.position_rows(
                *(traits.positions, tokens, lengths, attention_mask),
                *(positions, segments, filled_B),
            )
            pad = traits.positions.pad if traits.positions.counts == "tokens" else None
            x = x + rows_of(self.position_embedding.embedding[...].astype(x.dtype), rows, pad)
        return x if self.embedding_norm is None else self.embedding_norm(x)


def lacks_pooler(heads: Collection[str], classifier: ClassifierTraits) -> bool:
    """Return whether one of these heads reads a pooler's output although there is no pooler."""
    reads = "seq_relationship" in heads or ("classifier" in heads and classifier.reads == "pooled")
    return reads and "pooler" not in heads
