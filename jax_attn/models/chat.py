"""A conversation: of each longer text, only what is new is read."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jax_attn.attention import checks
from jax_attn.attention.annotations import AnyArray
from jax_attn.models import asked, generate
from jax_attn.models.asked import How, Rows
from jax_attn.models.encoder_decoder import EncoderDecoder

if TYPE_CHECKING:
    from jax_attn.models.model import Model


class Chat:
    """Texts that grow turn by turn, one in each row, and the cache of what was read of them.

    Each turn takes the whole text, as a tokenizer's chat template gives it. What begins as the text
    of the turn before is not read again. A cache that keeps the whole text goes back to where two
    texts part; the ring of a window cannot, so such a model then reads the row from its begin.

    Args:
      model: a causal language model.
      batch: the number of rows.
      length: the most tokens that a row may have, if the model's table of positions has as many.

    Raises ArgumentError for a model that has no cache, and for an encoder-decoder.
    """

    def __init__(self, model: "Model", batch: int = 1, length: int = 4096):
        problems = checks.count_problems(batch=batch, length=length) + asked.model_problems(model)
        if isinstance(model, EncoderDecoder):
            problems.append("model: expected a decoder alone, got one that reads an encoder")
        checks.raise_all("Chat", problems)
        self.model, self.batch = model, batch
        self.length, self._turn = min(length, model.most_tokens or length), 0
        self._forget()

    def _forget(self) -> None:
        self._caches: generate.Caches | None = None
        self._read = [np.zeros(0, np.int32)] * self.batch

    @property
    def read(self) -> tuple[Int[np.ndarray, " _T"], ...]:
        """The tokens of each row that are in the cache, which are all of its text but the last.

        The end of a row is in it as often as the other rows went on.
        """
        return tuple(self._read)

    def generate(
        self,
        tokens: Int[AnyArray, "B T"],
        lengths: Int[AnyArray, " B"] | None,
        max_new_tokens: int,
        *,
        attention_mask: Int[AnyArray, "B T"] | None = None,
        **how: Unpack[How],
    ) -> Int[Array, "B max_new_tokens"]:
        """Return the tokens that follow the whole text, as `Model.generate` does."""
        rows = Rows(tokens, lengths, attention_mask)
        (found,) = self._pieces(rows, max_new_tokens, how, "Chat.generate", max_new_tokens)
        return found

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
        """Return the same tokens as they come, as `Model.stream` does.

        What is not asked for is not generated. The next turn ends this one, which then raises an
        ArgumentError if it is asked for more.
        """
        rows = Rows(tokens, lengths, attention_mask)
        return self._pieces(rows, max_new_tokens, how, "Chat.stream", every)

    def _pieces(self, rows: Rows, count: int, how: How, where: str, every: int) -> Iterator[Array]:
        model, wanted = self.model, asked.merged(self.model, how)
        problems = asked.unknown_problems(rows, "because a chat keeps them")
        problems += asked.problems(model, rows, count, how, wanted, every, room=self.length)
        shape: Any = getattr(rows.tokens, "shape", ())
        if len(shape) == 2 and shape[0] != self.batch:
            problems.append(f"tokens: expected {self.batch} rows, got {shape[0]}")
        checks.raise_all(where, problems)
        known: Any = (None if x is None else np.asarray(x) for x in rows)
        prompt = generate.prompt_of(Rows(*known))
        texts = [row[:n] for row, n in zip(prompt.tokens, prompt.lengths, strict=True)]
        wanted = asked.settled(wanted, model.embedding.vocab_size)
        return self._generated(texts, wanted, int(count), int(every))

    def _generated(
        self, texts: list[np.ndarray], wanted: asked.Wanted, count: int, every: int
    ) -> Iterator[Array]:
        model = self.model
        kept = [self._kept(*pair) for pair in zip(self._read, texts, strict=True)]
        new = [text[n:] for text, n in zip(texts, kept, strict=True)]
        lengths = np.array([len(row) for row in new], np.int32)
        tokens = np.stack([np.pad(row, (0, lengths.max() - len(row))) for row in new])
        prompt = generate.prompt_of(Rows(tokens, lengths, None), model.most_tokens)
        seen = None
        if wanted.sampling.repetition_penalty is not None:
            seen = np.zeros((self.batch, model.embedding.vocab_size), bool)
            for row, text, n in zip(seen, texts, kept, strict=True):
                row[text[:n]] = True
        caches = self._caches or model.empty_cache(self.batch, self.length)
        # An array for each, because an array is given up once.
        caches = tuple(replace(cache, filled=jnp.array(kept, jnp.int32)) for cache in caches)
        self._forget()  # each step is given the caches, and may fail
        self._turn = turn = self._turn + 1
        going = generate.begun(model, wanted, prompt, caches, seen, length=self.length)
        written: list[np.ndarray] = []
        for now, piece, is_over in generate.streamed(model, wanted, going, count, every):
            written.append(np.asarray(piece))
            whole = zip(texts, np.concatenate(written, axis=1), strict=True)
            counts = np.asarray(now.caches[0].filled)
            self._caches = now.caches
            self._read = [np.concatenate(both)[:n] for both, n in zip(whole, counts, strict=True)]
            yield piece
            if is_over:
                return
            if self._turn != turn:
                why = "expected one turn after the other, but the next took this one's cache"
                checks.raise_all("Chat.stream", [why])
            self._forget()

    def _kept(self, read: np.ndarray, text: np.ndarray) -> int:
        """Return how many tokens in the cache are those of the text: not its last one."""
        n = min(len(read), len(text) - 1)
        parted = np.flatnonzero(read[:n] != text[:n])
        same = int(parted[0]) if parted.size else n
        is_ring = any(cache.window is not None for cache in self._caches or ())
        return 0 if is_ring and same < len(read) else same
