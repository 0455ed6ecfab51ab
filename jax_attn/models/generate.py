"""Generation: a language model chooses tokens one by one and reads each in turn.

A prompt is padded to the next of few lengths, and so is the cache, so that prompts of many lengths
share two programs: one reads the prompt, the other goes on token by token, up to a number that is
not compiled in.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from jax_attn.attention import checks
from jax_attn.attention.annotations import AnyArray
from jax_attn.attention.broadcasting import broadcasting
from jax_attn.models import asked, sampling
from jax_attn.models.asked import How, Rows, Wanted

if TYPE_CHECKING:
    from jax_attn.models.encoder_decoder import Decoding, EncoderDecoder
    from jax_attn.models.model import Model

    LanguageModel: TypeAlias = Model | EncoderDecoder

Caches: TypeAlias = Any
"""What a model's `empty_cache` returns, extended by what was read; None before it."""
_FEWEST = 16
"""The length to which shorter prompts are padded."""


class Prompt(NamedTuple):
    """Rows of tokens that begin with the first real one, and the number of the real ones."""

    tokens: Int[AnyArray, "B T"]
    lengths: Int[AnyArray, " B"]


class Going(NamedTuple):
    """A text at work.

    Attributes:
      caches: what was read: all tokens but each row's last one, and an end as often as it is
        repeated.
      last: (B,), each row's last token.
      steps: how many tokens have been chosen for each row.
      out: (B, R), those tokens, with room for more.
      seen: (B, V), which tokens a row has, if a penalty needs it.
    """

    caches: Caches
    last: Int[Array, " B"]
    steps: Int[Array, ""]
    out: Int[Array, "B R"]
    seen: Bool[Array, "B V"] | None


def bucket(n: int, most: int | None = None) -> int:
    """Return the length to which n is padded: 16, 24, 32, 48, …, but at most `most`, if that is n.

    These are the powers of two, and each one and a half times.
    """
    power = max(_FEWEST, 1 << (n - 1).bit_length())
    half = power * 3 // 4
    length = half if n <= half and half >= _FEWEST else power
    return length if most is None else max(n, min(length, most))


def prompt_of(rows: Rows, most: int | None = None) -> Prompt:
    """Return the rows as a prompt, padded to a bucket of at most `most` tokens.

    NumPy's arrays stay NumPy's, so that no program is compiled for their own length or dtype.
    """
    tokens, lengths, attention_mask = rows
    is_numpy = all(x is None or isinstance(x, np.ndarray) for x in rows)
    xp: Any = np if is_numpy else jnp
    tokens, T = tokens.astype(np.int32) if is_numpy else jnp.asarray(tokens), tokens.shape[1]
    if attention_mask is not None:
        mask = xp.asarray(attention_mask).astype(bool)
        lengths, first = mask.sum(axis=1), mask.argmax(axis=1)
        tokens = xp.take_along_axis(tokens, (first[:, None] + xp.arange(T)) % T, axis=1)
    if lengths is None:  # made of the tokens, which a mesh may have sharded
        lengths = xp.full_like(tokens[:, 0], T, dtype=np.int32)
    lengths = lengths.astype(np.int32) if is_numpy else lengths
    return Prompt(xp.pad(tokens, ((0, 0), (0, bucket(T, most) - T))), lengths)


def started(
    model: "Model", rows: Rows, count: int, how: How, where: str, every: int | None = None
) -> tuple[Going, Wanted]:
    """Check the arguments of `generate`, or of `stream`, and read the prompt into a cache.

    every: the tokens that a stream yields together.
    """
    wanted, prompt = _checked(model, rows, count, how, where, every)
    length = bucket(rows.tokens.shape[1] + int(count))
    return begun(model, wanted, prompt, None, None, length=length), wanted


def started_from_source(
    model: "EncoderDecoder", rows: Rows, count: int, how: How, where: str, every: int | None = None
) -> tuple[Going, Wanted]:
    """Do the same for rows that the encoder reads; the decoder begins with its start token."""
    start, others = asked.start_token(model)
    wanted, prompt = _checked(model, rows, count, how, where, every, others)
    length = bucket(1 + int(count))
    first, cache = _encoded(model, prompt, jnp.int32(start), length=length)
    return begun(model, wanted, first, cache, None, length=length), wanted


def _checked(
    model: "LanguageModel",
    rows: Rows,
    count: int,
    how: How,
    where: str,
    every: int | None,
    others: Sequence[str] = (),
) -> tuple[Wanted, Prompt]:
    """Return the arguments as they are compiled; others: further problems, told with theirs."""
    wanted, vocab_size = asked.merged(model, how), model.embedding.vocab_size
    streams = every is not None
    problems = asked.unknown_problems(rows, "to stream what follows") if streams else []
    problems += asked.problems(model, rows, count, how, wanted, every if streams else 1)
    checks.raise_all(where, [*problems, *others])
    return asked.settled(wanted, vocab_size), prompt_of(rows, model.most_tokens)


def all_at_once(
    model: "LanguageModel", wanted: Wanted, going: Going, count: int
) -> Int[Array, "B count"]:
    """Return the `count` tokens that follow each row."""
    return so_far(gone_on(model, wanted, going, jnp.int32(count)), count)


def streamed(
    model: "LanguageModel", wanted: Wanted, going: Going, count: int, every: int
) -> Iterator[tuple[Going, Int[Array, "B n"], bool]]:
    """Yield what there is after each `every` tokens, those tokens, and whether they are the last.

    They are if all rows have ended. The caches that were yielded are given up to the next step.
    """
    for first in range(0, count, every):
        upto = min(first + every, count)
        going = gone_on(model, wanted, going, jnp.int32(upto))
        is_over = upto == count or bool(np.isin(going.last, wanted.ends).all())
        yield going, so_far(going, upto - first, first), is_over
        if is_over:
            return


def so_far(going: Going, n: int, first: int = 0) -> Int[Array, "B n"]:
    """Return n tokens from the first of these on; behind a row's end it is repeated."""
    return _part(going.out, going.last, going.steps, jnp.int32(first), n)


@partial(jax.jit, static_argnames="n")
@broadcasting
def _part(out: jax.Array, last: jax.Array, steps: jax.Array, first: jax.Array, n: int) -> jax.Array:
    places = first + jnp.arange(n, dtype=jnp.int32)
    tokens = jax.lax.dynamic_slice_in_dim(out, first, n, axis=1)
    return jnp.where(places < steps, tokens, last[:, None])


@nnx.jit(static_argnames=("length",), graph_updates=False)
@broadcasting
def _encoded(
    model: "EncoderDecoder", prompt: Prompt, start: jax.Array, *, length: int
) -> tuple[Prompt, "Decoding"]:
    """Read the source; return the decoder's prompt and its cache, which reads the source."""
    # Lengths of its own, because the cache is given up and the caller's are not.
    source = model.encode(prompt.tokens, prompt.lengths + 0)
    tokens = jnp.full_like(prompt.tokens[:, :1], start)
    return Prompt(tokens, jnp.ones_like(tokens[:, 0])), model.empty_cache(source, length)


# Without graph updates, so that flax does not return and replace every parameter.
@nnx.jit(static_argnames=("length",), donate_argnames=("caches",), graph_updates=False)
@broadcasting
def begun(
    model: "LanguageModel",
    wanted: Wanted,
    prompt: Prompt,
    caches: Caches,
    seen: Bool[AnyArray, "B V"] | None,
    *,
    length: int,
) -> Going:
    """Read a prompt and choose the first token.

    caches, seen: of what was read before, None if it was nothing; the caches are given up. length:
    the most tokens that a row will have.
    """
    B, T = prompt.tokens.shape
    if caches is None:
        caches = cast("Model", model).empty_cache(B, length)
    if wanted.sampling.repetition_penalty is not None:
        is_real_BT = jnp.arange(T) < prompt.lengths[:, None]
        words = jnp.arange(model.embedding.vocab_size)
        # Not a scatter, which would have to know how a mesh shards the rows.
        new_BV = ((prompt.tokens[..., None] == words) & is_real_BT[..., None]).any(axis=1)
        seen = new_BV if seen is None else seen | new_BV
    logits_BV, caches = model.continued(prompt.tokens, prompt.lengths, caches)
    last = _chosen(wanted, logits_BV, seen, 0)
    first = jnp.where(jnp.arange(length) == 0, last[:, None], 0)
    return Going(caches, last, jnp.int32(1), first, _with(seen, last))


def gone_on(model: "LanguageModel", wanted: Wanted, going: Going, until: jax.Array) -> Going:
    """Choose tokens until there are `until` or all rows have ended; the caches are given up."""
    return _gone_on(model, wanted, going.caches, going._replace(caches=()), until)


@nnx.jit(donate_argnames=("caches",), graph_updates=False)
@broadcasting
def _gone_on(
    model: "LanguageModel", wanted: Wanted, caches: Caches, going: Going, until: jax.Array
) -> Going:
    places = jnp.arange(going.out.shape[1], dtype=jnp.int32)

    def is_left(going: Going) -> jax.Array:
        return (going.steps < until) & _go_on(wanted, going.last).any()

    def step(going: Going) -> Going:
        logits_BV, caches = model.continued(going.last[:, None], None, going.caches)
        last = _chosen(wanted, logits_BV, going.seen, going.steps)
        last = jnp.where(_go_on(wanted, going.last), last, going.last)
        # Not an indexed update, which would have to know how a mesh shards the rows.
        tokens = jnp.where(places == going.steps, last[:, None], going.out)
        return Going(caches, last, going.steps + 1, tokens, _with(going.seen, last))

    return jax.lax.while_loop(is_left, step, going._replace(caches=caches))


def _chosen(
    wanted: Wanted, logits_BV: jax.Array, seen_BV: AnyArray | None, step: Any
) -> Int[Array, " B"]:
    key = None if wanted.key is None else jax.random.fold_in(wanted.key, step)
    if wanted.choose is None:
        found: Any = sampling.chosen(logits_BV, seen_BV, wanted.sampling, key)
    else:
        found = wanted.choose(logits_BV, key)
    if not checks.is_integer_array(found) or found.shape != logits_BV.shape[:1]:
        expected = f"integers of shape {logits_BV.shape[:1]}, a token for each row"
        text = f"choose: expected {expected}, got {checks.summary(found)}"
        checks.raise_all("generate", [text])
    is_number = ~jnp.isnan(logits_BV).any(axis=1)
    return jnp.where(is_number, jnp.asarray(found).astype(jnp.int32), -1)


def _go_on(wanted: Wanted, last: jax.Array) -> Bool[Array, " B"]:
    return jnp.all(last[:, None] != jnp.array(wanted.ends, jnp.int32), axis=1)


def _with(seen: Any, last: jax.Array) -> jax.Array | None:
    """Return the seen tokens of each row, with its last one."""
    return None if seen is None else seen | (jnp.arange(seen.shape[1]) == last[:, None])
