"""Claims: predicates of a row that say whether it should detect a planted bug."""

from collections.abc import Callable

import numpy as np

from jax_attn.attention.kernels.tile_sizes import KEYS
from jax_attn.attention.kv_cache import PageSizes
from jax_attn.selfcheck.matrix.cases import Case
from jax_attn.selfcheck.oracle import AttentionProblem

FINE = ("float64", "float32", "float16")
"""Precisions finer than bfloat16's."""
SINGLE = ("float64", "float32")
"""Precisions finer than the half precisions."""

Claim = Callable[[Case, AttentionProblem, str], bool]
"""(case, its problem, a precision) -> whether the case claims to detect the bug."""


def always(c: Case, p: AttentionProblem, u: str) -> bool:
    return True


def several(c: Case, p: AttentionProblem, u: str) -> bool:
    """Claim rows of several keys: with one key, the softmax is 1 whatever its score is."""
    return c.size.S > 1


def several_tiles(c: Case, p: AttentionProblem, u: str) -> bool:
    """Claim rows of more keys than one shipped tile of the blocked kernel."""
    return c.size.S > KEYS


def several_pages(c: Case, p: AttentionProblem, u: str) -> bool:
    """Claim rows of cached designs with more tokens than the first page of a shipped cache."""
    return "cached" in c.design and PageSizes.first < c.size.T


def hides(c: Case, p: AttentionProblem, u: str) -> bool:
    return p.allowed is not None and not p.allowed.all()


def sees_nothing(c: Case, p: AttentionProblem, u: str) -> bool:
    """Claim rows in which a query may attend to nothing, not even to an extra key."""
    return c.mask == "empty_row" and not (p.extra_columns or "sinks" in p.weights)


def extra_columns(c: Case, p: AttentionProblem, u: str) -> bool:
    """Claim rows with a learned key or one of zeros."""
    return p.extra_columns > 0


def zero_key(c: Case, p: AttentionProblem, u: str) -> bool:
    return p.add_zero_attn


def any_mask(*masks: str) -> Claim:
    return lambda c, p, u: c.mask in masks


def at(precisions: tuple[str, ...]) -> Claim:
    return lambda c, p, u: u in precisions


def weight(name: str) -> Claim:
    return lambda c, p, u: name in p.weights


def alike(*names: str) -> Claim:
    """Claim rows in which the projections' kernels have one shape."""
    return lambda c, p, u: len({p.weights[f"{n}.weight"].shape for n in names}) == 1


def square(name: str) -> Claim:
    return lambda c, p, u: bool(np.equal(*p.weights[f"{name}.weight"].shape))


def steps(*kinds: type) -> Claim:
    return lambda c, p, u: {*kinds} <= {type(step) for step in p.after}


def cached(*variants: str) -> Claim:
    return lambda c, p, u: c.design.partition("/")[2] in variants


def tells_heads(c: Case, p: AttentionProblem, u: str) -> bool:
    """Claim rows in which heads differ: with one key and one key/value head, no query matters."""
    return p.num_heads > 1 and (p.num_kv_heads > 1 or c.size.S > 1)


def grouped(c: Case, p: AttentionProblem, u: str) -> bool:
    return 1 < p.num_kv_heads < p.num_heads


def every(*claims: Claim) -> Claim:
    return lambda c, p, u: all(claim(c, p, u) for claim in claims)


def several_and(*claims: Claim) -> Claim:
    """Claim rows of several keys that meet all of these claims."""
    return every(several, *claims)
