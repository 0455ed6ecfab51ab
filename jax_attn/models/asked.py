"""What a call of `generate` asks for: how tokens are chosen, and which end a row."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jax_attn.attention import checks
from jax_attn.attention.annotations import AnyArray
from jax_attn.models import inputs, sampling
from jax_attn.models.sampling import Sampling

if TYPE_CHECKING:
    from jax_attn.models.model import Model

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


class How(TypedDict, total=False):
    """How `generate` chooses tokens. What is not given, or None, is as the checkpoint says.

    Attributes:
      temperature: divides the logits; 0 takes the likeliest token, as does a checkpoint without a
        generation_config.json that draws.
      top_k: leave the k likeliest tokens.
      top_p: leave the likeliest tokens whose probabilities add up to p.
      min_p: leave the tokens with at least this share of the likeliest one's probability.
      repetition_penalty: divide the logits above 0 of the row's tokens by it, multiply others.
      eos_token_id: a token, or several, that ends a row; () for none. It is repeated in the rest
        of the row; once all rows have ended, computation stops.
      choose: in place of the numbers, a function of logits (B, V) and a key that returns each
        row's next token, (B,). It is traced, so it must be a pure function.
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


def wanted(model: "Model", how: How) -> Wanted:
    """Return what a call asks for; what it leaves open is as the model's checkpoint says."""
    if unknown := how.keys() - How.__annotations__.keys():
        raise TypeError(f"generate: got unexpected arguments {', '.join(sorted(unknown))}")
    defaults, choose = model.generation, how.get("choose")
    asked = numbers = Sampling(*map(how.get, Sampling._fields))
    if choose is None:
        held = defaults.sampling if defaults.draws else defaults.sampling._replace(temperature=None)
        temperature = held.temperature if asked.temperature is None else asked.temperature
        if checks.is_real(temperature) and temperature == 0:
            temperature = None
        if temperature is None:  # for the likeliest token only the penalty counts
            held = Sampling(repetition_penalty=held.repetition_penalty)
        both = zip(asked, held, strict=True)
        numbers = Sampling(*(own if given is None else given for given, own in both))
        numbers = numbers._replace(temperature=temperature)
    ends: Any = how.get("eos_token_id")
    ends = defaults.ends if ends is None else np.atleast_1d(np.asarray(ends, object)).tolist()
    return Wanted(numbers, how.get("key"), tuple(ends), choose)


def settled(wanted: Wanted) -> Wanted:
    """Return the same, of which nothing is wrong, with its ends as sorted numbers."""
    return dataclasses.replace(wanted, ends=tuple(sorted({*map(int, wanted.ends)})))


def problems(
    model: "Model",
    tokens: Any,
    lengths: Any,
    attention_mask: Any,
    max_new_tokens: Any,
    wanted: Wanted,
    every: Any = 1,
    *,
    room: int | None = None,
) -> list[str]:
    """Say what is wrong with the arguments of `generate`. Values are checked if they are known.

    room: the most tokens that a row can have, if a cache is given.
    """
    traits, reads = model.embedding, model.reads
    given = tokens, lengths, attention_mask
    found = inputs.problems(traits, reads, *given, None, None, None, None)
    is_readable = not found
    if is_readable and attention_mask is not None and not _is_known(attention_mask):
        found.append("attention_mask: expected known values, which say where each row begins")
    elif is_readable and attention_mask is not None:
        edges = np.abs(np.diff(np.pad(np.asarray(attention_mask, np.int8), ((0, 0), (1, 1)))))
        if broken := np.flatnonzero(edges.sum(axis=1) > 2).tolist():
            expected = "the tokens of a row one behind the other"
            found.append(f"attention_mask: expected {expected}, got gaps in rows {broken}")
    found += inputs.cache_problems(reads)
    if not model.is_language_model:
        found.append("model: expected a language model's head and no other")
    counts = checks.count_problems(max_new_tokens=max_new_tokens, every=every)
    if is_readable and not counts:
        longest = [] if room is None else [room + 1]
        if traits.positions is not None:
            longest.append(inputs.longest(traits.positions) + 1)  # the last token is not read
        most = min(longest, default=None)
        read = _fewest_read(tokens, lengths, attention_mask)
        if most is not None and max_new_tokens > most - read:
            expected = f"at most {most - read} after {read} tokens"
            counts = [f"max_new_tokens: expected {expected}, got {max_new_tokens}"]
    found += counts
    if not all(checks.is_int(end) and 0 <= end < traits.vocab_size for end in wanted.ends):
        expected = f"a token of 0 to {traits.vocab_size - 1}, or a sequence of them"
        found.append(f"eos_token_id: expected {expected}, got {', '.join(map(repr, wanted.ends))}")
    found += [] if wanted.key is None else checks.key_problems(wanted.key)
    found += sampling.problems(wanted.sampling)
    if wanted.choose is None:
        found += [f"model.generation: {why}" for why in model.generation.refused]
        if wanted.sampling.temperature is not None and wanted.key is None:
            found.append("key: expected one jax.random.key(...) to draw by, got None")
        return found
    if not (callable(wanted.choose) and isinstance(wanted.choose, Hashable)):
        got = checks.summary(wanted.choose)
        found.append(f"choose: expected a function of logits and a key, got {got}")
    numbers = [name for name, x in wanted.sampling._asdict().items() if x is not None]
    return found + [f"{name}: expected None beside choose" for name in numbers]


def _is_known(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer)


def _fewest_read(tokens: Any, lengths: Any, attention_mask: Any) -> int:
    """Return the number of tokens of the longest row; unknown lengths are at least 1."""
    if attention_mask is not None and _is_known(attention_mask):
        return int(np.asarray(attention_mask).sum(axis=1).max())
    if lengths is None:
        return tokens.shape[1]
    return int(np.asarray(lengths).max()) if _is_known(lengths) else 1
