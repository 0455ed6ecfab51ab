"""Read the arguments of `generate`: how tokens are chosen, and which end a row."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jax_attn.attention import checks
from jax_attn.attention.annotations import AnyArray
from jax_attn.models import inputs, sampling
from jax_attn.models.defaults import OF_DRAWS
from jax_attn.models.sampling import Sampling

if TYPE_CHECKING:
    from jax_attn.models.encoder_decoder import EncoderDecoder
    from jax_attn.models.generate import LanguageModel

Choose = Callable[[Float[Array, "B V"], Any], Int[AnyArray, " B"]]
"""(logits, key) → each row's next token. key: this step's; None if `generate` has none."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["sampling", "key"],
    meta_fields=["ends", "choose"],
)
@dataclasses.dataclass(frozen=True)
class Wanted:
    """How tokens are chosen, and which end a row. choose: takes the place of `sampling`."""

    sampling: Sampling
    key: jax.Array | None
    ends: tuple[int, ...]
    choose: Choose | None


class Rows(NamedTuple):
    """Tokens as they are given, and which of them are real, as `Model` has it."""

    tokens: Int[AnyArray, "B T"]
    lengths: Int[AnyArray, " B"] | None
    attention_mask: Int[AnyArray, "B T"] | None


class How(TypedDict, total=False):
    """How `generate` chooses tokens. What is not given, or None, is as the checkpoint says.

    Attributes:
      temperature: divides the logits, before a token is drawn; 0 takes the likeliest token. If the
        checkpoint says nothing, it is 0.
      top_k: leave the k likeliest tokens.
      top_p: leave the likeliest tokens whose probabilities add up to p.
      min_p: leave the tokens with at least this share of the likeliest one's probability.
      repetition_penalty: divide the logits above 0 of the row's tokens by it, multiply others.
      eos_token_id: a token, or several, that ends a row; () for none. It is repeated in the rest
        of the row; once all rows have ended, computation stops.
      choose: in place of the numbers, a function of logits (B, V) and a key that returns each
        row's next token, (B,). It is traced, so it must be a pure function. After a token outside
        the vocabulary, a row has -1 alone.
      key: a jax.random key, of which each step gets its own.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    eos_token_id: int | Sequence[int] | None
    choose: Choose | None
    key: jax.Array | None


def merged(model: "LanguageModel", how: How) -> Wanted:
    """Return what a call asks for; what it leaves open is as the model's checkpoint says."""
    if unknown := how.keys() - How.__annotations__.keys():
        raise TypeError(f"generate: got unexpected arguments {', '.join(sorted(unknown))}")
    defaults, choose = model.generation, how.get("choose")
    given = numbers = Sampling(*map(how.get, Sampling._fields))
    if choose is None:
        held = defaults.sampling if defaults.draws else defaults.sampling._replace(temperature=None)
        temperature = held.temperature if given.temperature is None else given.temperature
        if checks.is_real(temperature) and temperature == 0:
            temperature = None
        if temperature is None:  # for the likeliest token only the penalty counts
            held = Sampling(repetition_penalty=held.repetition_penalty)
        both = zip(given, held, strict=True)
        numbers = Sampling(*(own if own is not None else other for own, other in both))
        numbers = numbers._replace(temperature=temperature)
    ends: Any = how.get("eos_token_id")
    if ends is None:
        ends = defaults.ends
    elif _is_known(ends):
        ends = np.atleast_1d(np.asarray(ends, object)).tolist()
    else:
        ends = (ends,)  # which is refused
    return Wanted(numbers, how.get("key"), tuple(ends), choose)


def settled(wanted: Wanted, vocab_size: int) -> Wanted:
    """Return the same, of which nothing is wrong, in the types and the order that are compiled."""
    numbers = sampling.settled(wanted.sampling, vocab_size)
    ends = tuple(sorted({*map(int, wanted.ends)}))
    return dataclasses.replace(wanted, sampling=numbers, ends=ends)


def problems(
    model: "LanguageModel",
    rows: Rows,
    max_new_tokens: Any,
    how: How,
    wanted: Wanted,
    every: Any = 1,
    *,
    room: int | None = None,
) -> list[str]:
    """Say what is wrong with the arguments of `generate`. Values are checked if they are known.

    wanted: `how`, merged. room: the most tokens that a row can have, if a cache is given.
    """
    found = inputs.problems(model.embedding, model.reads, *rows, None, None, None, None)
    is_readable = not found
    if is_readable:
        found += _mask_problems(rows.attention_mask)
    found += model_problems(model)
    counts = checks.count_problems(max_new_tokens=max_new_tokens, every=every)
    if not counts and max_new_tokens > (most := np.iinfo(np.int32).max):
        counts = [f"max_new_tokens: expected at most {most}, got {max_new_tokens}"]
    if is_readable and not counts:
        counts = _room_problems(model, rows, max_new_tokens, room)
    return found + counts + _choice_problems(model, how, wanted)


def model_problems(model: "LanguageModel") -> list[str]:
    """Say why this model cannot generate."""
    found = inputs.cache_problems(model.reads)
    if not model.is_language_model:
        found.append("model: expected a language model's head and no other")
    return found


def start_token(model: "EncoderDecoder") -> tuple[int, list[str]]:
    """Return the token with which the decoder begins, and what is wrong with it."""
    start, vocab_size = model.generation.start, model.embedding.vocab_size
    if checks.is_int(start) and 0 <= start < vocab_size:
        return start, []
    expected = f"a token of 0 to {vocab_size - 1}"
    return 0, [f"model.generation: decoder_start_token_id: expected {expected}, got {start!r}"]


def unknown_problems(rows: Rows, why: str) -> list[str]:
    """Say which of these arrays are unknown, as under jit. why: what needs their values."""
    unknown = (name for name, x in rows._asdict().items() if not _is_known(x))
    return [f"{name}: expected known values, {why}" for name in unknown]


def _mask_problems(attention_mask: Any) -> list[str]:
    if attention_mask is None:
        return []
    if not _is_known(attention_mask):
        return ["attention_mask: expected known values, which say where each row begins"]
    edges = np.abs(np.diff(np.pad(np.asarray(attention_mask, np.int8), ((0, 0), (1, 1)))))
    if broken := np.flatnonzero(edges.sum(axis=1) > 2).tolist():
        expected = "the tokens of a row one behind the other"
        return [f"attention_mask: expected {expected}, got gaps in rows {broken}"]
    return []


def _room_problems(model: "LanguageModel", rows: Rows, count: int, room: int | None) -> list[str]:
    limits = [n for n in (room, model.most_tokens) if n is not None]
    if not limits:
        return []
    most, read = min(limits), _longest_row(rows)
    if read > most:
        return [f"tokens: expected at most {most} in a row, got {read}"]
    if count <= (left := most + 1 - read):  # the last token is not read
        return []
    return [f"max_new_tokens: expected at most {left} after {read} tokens, got {count}"]


def _choice_problems(model: "LanguageModel", how: How, wanted: Wanted) -> list[str]:
    """Say what is wrong with how tokens are chosen."""
    numbers, vocab_size, defaults = wanted.sampling, model.embedding.vocab_size, model.generation
    found = []
    if not all(checks.is_int(end) and 0 <= end < vocab_size for end in wanted.ends):
        expected = f"a token of 0 to {vocab_size - 1}, or a sequence of them"
        found.append(f"eos_token_id: expected {expected}, got {', '.join(map(repr, wanted.ends))}")
    found += [] if wanted.key is None else checks.key_problems(wanted.key)
    found += sampling.problems(numbers)
    if wanted.choose is None:
        draws, given = numbers.temperature is not None, {k for k, x in how.items() if x is not None}
        for name, why in defaults.refused:
            if name not in given and (draws or name not in OF_DRAWS):
                way = "take it out of the file, or set model.generation = models.Defaults()"
                way = f"give {name}=" if name in How.__annotations__ else way
                found.append(f"model.generation: {name}: {why}; {way}")
        if draws and wanted.key is None:
            found.append("key: expected one jax.random.key(...) to draw by, got None")
        return found
    if not (callable(wanted.choose) and isinstance(wanted.choose, Hashable)):
        got = checks.summary(wanted.choose)
        found.append(f"choose: expected a function of logits and a key, got {got}")
    idle = [name for name, x in numbers._asdict().items() if x is not None]
    return found + [f"{name}: expected None beside choose" for name in idle]


def _is_known(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer)


def _longest_row(rows: Rows) -> int:
    """Return the number of tokens of the longest row; unknown lengths are at least 1."""
    if rows.attention_mask is not None and _is_known(rows.attention_mask):
        return int(np.asarray(rows.attention_mask).sum(axis=1).max())
    if rows.lengths is None:
        return rows.tokens.shape[1]
    return int(np.asarray(rows.lengths).max()) if _is_known(rows.lengths) else 1
