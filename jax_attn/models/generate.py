"""Generation: a language model chooses tokens one by one and reads each in turn.

A prompt is padded to the next of few lengths, and so is the cache, so that prompts of many lengths
share two programs: one reads the prompt, the other goes on token by token, up to a number that is
not compiled in.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from jax_attn.attention import KVCache, checks
from jax_attn.attention.annotations import AnyArray
from jax_attn.models import asked, sampling
from jax_attn.models.asked import How, Wanted

if TYPE_CHECKING:
    from jax_attn.models.model import Model

Caches = tuple[KVCache, ...]
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
    """Return the length, a power of two or half as much again, to which n is padded; or `most`."""
    power = max(_FEWEST, 1 << (n - 1).bit_length())
    half = power * 3 // 4
    length = half if n <= half and half >= _FEWEST else power
    return length if most is None else max(n, min(length, most))


def prompt_of(
    tokens: AnyArray,
    lengths: AnyArray | None,
    attention_mask: AnyArray | None = None,
    most: int | None = None,
) -> Prompt:
    """Return the rows as a prompt, padded to a bucket of at most `most` tokens.

    NumPy's arrays stay NumPy's, so that no program is compiled for their own length or dtype.
    """
    given = tokens, lengths, attention_mask
    is_numpy = all(x is None or isinstance(x, np.ndarray) for x in given)
    xp: Any = np if is_numpy else jnp
    tokens, T = tokens.astype(np.int32) if is_numpy else jnp.asarray(tokens), tokens.shape[1]
    if attention_mask is not None:
        mask = xp.asarray(attention_mask).astype(bool)
        lengths, first = mask.sum(axis=1), mask.argmax(axis=1)
        tokens = xp.take_along_axis(tokens, (first[:, None] + xp.arange(T)) % T, axis=1)
    if lengths is None:  # made of the tokens, which a mesh may have sharded
        lengths = xp.full_like(tokens[:, 0], T)
    lengths = lengths.astype(np.int32) if is_numpy else lengths
    return Prompt(xp.pad(tokens, ((0, 0), (0, bucket(T, most) - T))), lengths)


def started(
    model: "Model",
    tokens: AnyArray,
    lengths: AnyArray | None,
    attention_mask: AnyArray | None,
    count: int,
    how: How,
    every: int = 1,
) -> tuple[Going, Wanted]:
    """Check the arguments of `Model.generate`, and read the prompt into a cache of its own."""
    wanted, given = asked.wanted(model, how), (tokens, lengths, attention_mask)
    checks.raise_all("Model.generate", asked.problems(model, *given, count, wanted, every))
    wanted, prompt = asked.settled(wanted), prompt_of(*given, model.most_tokens)
    length = bucket(tokens.shape[1] + count - 1)  # the last token is not read
    return begun(model, wanted, prompt, length=length, room=bucket(count)), wanted


def all_at_once(model: "Model", wanted: Wanted, going: Going, count: int) -> Int[Array, "B count"]:
    """Return the `count` tokens that follow each row."""
    return so_far(gone_on(model, wanted, going, jnp.int32(count)), count)


def streamed(
    model: "Model", wanted: Wanted, going: Going, count: int, every: int
) -> Iterator[tuple[Going, Int[Array, "B n"]]]:
    """Yield what there is after each `every` tokens, and those tokens, until all rows have ended.

    What was yielded before has been given up to the next step, but for its tokens.
    """
    for first in range(0, count, every):
        upto = min(first + every, count)
        going = gone_on(model, wanted, going, jnp.int32(upto))
        yield going, so_far(going, upto - first, first)
        if int(going.steps) < upto or (upto < count and not _go_on(wanted, going.last).any()):
            return


def so_far(going: Going, n: int, first: int = 0) -> Int[Array, "B n"]:
    """Return n tokens from the first of these on; behind a row's end it is repeated."""
    return _part(going.out, going.last, going.steps, jnp.int32(first), n)


@partial(jax.jit, static_argnames="n")
def _part(out: jax.Array, last: jax.Array, count: jax.Array, first: jax.Array, n: int) -> jax.Array:
    places = first + jnp.arange(n, dtype=jnp.int32)
    tokens = jax.lax.dynamic_slice_in_dim(out, first, n, axis=1)
    return jnp.where(places < count, tokens, last[:, None])


# Without graph updates, so that flax does not return and replace every parameter.
@nnx.jit(static_argnames=("length", "room"), graph_updates=False)
def begun(
    model: "Model",
    wanted: Wanted,
    prompt: Prompt,
    caches: Caches | None = None,
    seen: Bool[AnyArray, "B V"] | None = None,
    *,
    length: int = 0,
    room: int,
) -> Going:
    """Read a prompt and choose the first token.

    caches, seen: of what was read before; without caches there is room for `length` tokens. room:
    for the tokens that will be generated.
    """
    B, T = prompt.tokens.shape
    if caches is None:
        caches = model.empty_cache(B, length)
    if wanted.sampling.repetition_penalty is not None:
        is_real_BT = jnp.arange(T) < prompt.lengths[:, None]
        seen = jnp.zeros((B, model.embedding.vocab_size), bool) if seen is None else seen
        seen = jax.vmap(lambda row, token, real: row.at[token].max(real))(
            seen, jnp.asarray(prompt.tokens), is_real_BT
        )
    out = model(prompt.tokens, prompt.lengths, cache=caches)
    assert out.cache is not None
    # XLA does not compute the logits of other tokens, which are not used.
    logits_BV = model.next_logits(out.hidden, prompt.lengths)
    last = _chosen(wanted, logits_BV, seen, 0)
    places = jnp.arange(room, dtype=jnp.int32)
    first = jnp.where(places == 0, last[:, None], 0)
    return Going(out.cache, last, jnp.int32(1), first, _with(seen, last))


def gone_on(model: "Model", wanted: Wanted, going: Going, until: jax.Array) -> Going:
    """Choose tokens until there are `until` or all rows have ended; the caches are given up."""
    return _gone_on(model, wanted, going.caches, going._replace(caches=()), until)


@nnx.jit(donate_argnames=("caches",), graph_updates=False)
def _gone_on(
    model: "Model", wanted: Wanted, caches: Caches, going: Going, until: jax.Array
) -> Going:
    places = jnp.arange(going.out.shape[1], dtype=jnp.int32)

    def is_left(going: Going) -> jax.Array:
        return (going.steps < until) & _go_on(wanted, going.last).any()

    def step(going: Going) -> Going:
        out = model(going.last[:, None], cache=going.caches)
        assert out.cache is not None
        logits_BV = model.next_logits(out.hidden, None)
        last = _chosen(wanted, logits_BV, going.seen, going.steps)
        last = jnp.where(_go_on(wanted, going.last), last, going.last)
        # Not an indexed update, which would have to know how a mesh shards the rows.
        tokens = jnp.where(places == going.steps, last[:, None], going.out)
        return Going(out.cache, last, going.steps + 1, tokens, _with(going.seen, last))

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
