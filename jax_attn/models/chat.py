"""A conversation: of each longer text, only what is new is read."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jax_attn.attention import checks
from jax_attn.attention.annotations import AnyArray
from jax_attn.models import asked, generate, inputs

if TYPE_CHECKING:
    from typing import Unpack

    from jax_attn.models.asked import How
    from jax_attn.models.model import Model


class Chat:
    """Texts that grow turn by turn, one in each row, and the cache of what was read of them.

    Each turn takes the whole text, as a tokenizer's chat template gives it. What begins as the text
    of the turn before is not read again. A cache that keeps the whole text goes back to where two
    texts part; the ring of a window cannot, so such a model then reads the row from its begin.

    Args:
      model: a causal language model.
      batch: the number of rows.
      length: the most tokens that a row may have.

    Raises ArgumentError for a model that has no cache.
    """

    def __init__(self, model: "Model", batch: int = 1, length: int = 4096):
        checks.raise_all("Chat", checks.count_problems(batch=batch, length=length))
        self.model, self.batch, self.length = model, batch, length
        checks.raise_all("Chat", inputs.cache_problems(model.reads))
        self._caches: generate.Caches | None = None
        self._forget()

    def _forget(self) -> None:
        self._caches, self._read = None, [np.zeros(0, np.int32)] * self.batch

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
        **how: "Unpack[How]",
    ) -> Int[Array, "B max_new_tokens"]:
        """Return the tokens that follow the whole text, as `Model.generate` does."""
        given = tokens, lengths, attention_mask
        (found,) = self._pieces(*given, max_new_tokens, max_new_tokens, how)
        return found

    def stream(
        self,
        tokens: Int[AnyArray, "B T"],
        lengths: Int[AnyArray, " B"] | None,
        max_new_tokens: int,
        *,
        every: int = 4,
        attention_mask: Int[AnyArray, "B T"] | None = None,
        **how: "Unpack[How]",
    ) -> Iterator[Int[Array, "B n"]]:
        """Return the same tokens as they come, as `Model.stream` does.

        Until the next turn, what was not asked for is not generated, and not part of the text.
        """
        return self._pieces(tokens, lengths, attention_mask, max_new_tokens, every, how)

    def _pieces(
        self,
        tokens: AnyArray,
        lengths: AnyArray | None,
        attention_mask: AnyArray | None,
        count: int,
        every: int,
        how: "How",
    ) -> Iterator[Array]:
        wanted = asked.wanted(self.model, how)
        given = tokens, lengths, attention_mask
        problems = asked.problems(self.model, *given, count, wanted, every, room=self.length)
        if not problems and tokens.shape[0] != self.batch:
            problems = [f"tokens: expected {self.batch} rows, got {tokens.shape[0]}"]
        checks.raise_all("Chat", problems)
        known: Any = (None if x is None else np.asarray(x) for x in given)
        prompt = generate.prompt_of(*known)
        texts = [row[:n] for row, n in zip(prompt.tokens, prompt.lengths, strict=True)]
        return self._generated(texts, asked.settled(wanted), count, every)

    def _generated(
        self, texts: list[np.ndarray], wanted: asked.Wanted, count: int, every: int
    ) -> Iterator[Array]:
        kept = [self._kept(*pair) for pair in zip(self._read, texts, strict=True)]
        new = [text[n:] for text, n in zip(texts, kept, strict=True)]
        lengths = np.array([len(row) for row in new], np.int32)
        rows = np.stack([np.pad(row, (0, lengths.max() - len(row))) for row in new])
        # Padding behind the end of a table of positions would be NaN.
        left = None if (most := self.model.most_tokens) is None else most - max(kept)
        caches, filled = self._caches, jnp.array(kept, jnp.int32)
        if caches is None:
            caches = self.model.empty_cache(self.batch, self.length)
        caches = tuple(replace(cache, filled=filled) for cache in caches)
        seen = None
        if wanted.sampling.repetition_penalty is not None:
            seen = np.zeros((self.batch, self.model.embedding.vocab_size), bool)
            for row, text in zip(seen, texts, strict=True):
                row[text] = True
        prompt = generate.prompt_of(rows, lengths, most=left)
        room = generate.bucket(count)
        going = generate.begun(self.model, wanted, prompt, caches, seen, room=room)
        written: list[np.ndarray] = []
        for now, tokens in generate.streamed(self.model, wanted, going, count, every):
            written.append(np.asarray(tokens))
            whole = zip(texts, np.concatenate(written, axis=1), strict=True)
            counts = np.asarray(now.caches[0].filled)
            self._caches = now.caches
            self._read = [np.concatenate(both)[:n] for both, n in zip(whole, counts, strict=True)]
            yield tokens
            if len(written) * every < count:
                self._forget()  # the next step takes these caches, and may fail

    def _kept(self, read: np.ndarray, text: np.ndarray) -> int:
        """Return how many tokens in the cache are those of the text: not its last one."""
        n = min(len(read), len(text) - 1)
        parted = np.flatnonzero(read[:n] != text[:n])
        same = int(parted[0]) if parted.size else n
        is_ring = any(cache.window is not None for cache in self._caches or ())
        return 0 if is_ring and same < len(read) else same
