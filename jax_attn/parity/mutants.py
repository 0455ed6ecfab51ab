"""Mutants: attention with one planted port bug each, to show that the rows see them.

A row claims to catch certain bugs. Each claim is tried, at no compilation: the mutant goes through
the comparison in the port's place, and must fail. A row whose mutant lives has not shown what it
says, and is INCONCLUSIVE; `verify --power` tries every mutant on every row that claims it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from jax_attn.parity.cases import Case, first_piece
from jax_attn.parity.mutable import Plants, capped, head_size
from jax_attn.parity.oracle import Norm, Problem, Turn

FINE = ("float64", "float32", "float16")
"""Precisions finer than bfloat16's."""
SINGLE = ("float64", "float32")
"""Those finer than the half precisions."""

Claim = Callable[[Case, Problem, str], bool]
Change = Callable[[Problem], Problem]


@dataclass(frozen=True)
class Mutant:
    """plants: the wrong steps (`mutable.STEPS`). meant: the row (design, mask) made to catch it,
    in float32. claimed: whether a row, at a precision, says it would see it."""

    plants: Plants
    meant: tuple[str, str]
    claimed: Claim


# --- what a row has --------------------------------------------------------------------------


def _always(c: Case, p: Problem, u: str) -> bool:
    return True


def _several(c: Case, p: Problem, u: str) -> bool:
    """With one key the softmax is 1 whatever the scores: queries and keys do not matter."""
    return c.size.S > 1


def _hides(c: Case, p: Problem, u: str) -> bool:
    return p.allowed is not None and not p.allowed.all()


def _any_mask(*masks: str) -> Claim:
    return lambda c, p, u: c.mask in masks


def _at(precisions: tuple[str, ...]) -> Claim:
    return lambda c, p, u: u in precisions


def _weight(name: str) -> Claim:
    return lambda c, p, u: name in p.weights


def _alike(*names: str) -> Claim:
    """The projections' kernels have one shape."""
    return lambda c, p, u: len({p.weights[f"{n}.weight"].shape for n in names}) == 1


def _square(name: str) -> Claim:
    return lambda c, p, u: bool(np.equal(*p.weights[f"{name}.weight"].shape))


def _steps(*kinds: type) -> Claim:
    return lambda c, p, u: {*kinds} <= {type(step) for step in p.after}


def _cached(*variants: str) -> Claim:
    return lambda c, p, u: c.design.partition("/")[2] in variants


def _tells_heads(c: Case, p: Problem, u: str) -> bool:
    """With one key and one key/value head, no query matters."""
    return p.num_heads > 1 and (p.num_kv_heads > 1 or c.size.S > 1)


def _grouped(c: Case, p: Problem, u: str) -> bool:
    return 1 < p.num_kv_heads < p.num_heads


def _all(*claims: Claim) -> Claim:
    return lambda c, p, u: all(claim(c, p, u) for claim in claims)


# --- what goes wrong ---------------------------------------------------------------------------


def _given(change: Change) -> Plants:
    """The port is given another problem."""
    return {"problem": lambda right, p: change(right(p))}


def _masked(change: Callable[[np.ndarray], np.ndarray | None]) -> Plants:
    return _given(lambda p: replace(p, allowed=change(np.array(p.allowed))))


def _later(allowed: np.ndarray) -> np.ndarray:
    """Every query sees what it should, moved one key to the right."""
    allowed[..., 1:] = allowed[..., :-1].copy()
    return allowed


def _longer(allowed: np.ndarray, towards: int) -> np.ndarray:
    """Every query sees one key more, to the left (-1) or the right (1) of the others."""
    return allowed | _beside(allowed, towards)


def _beside(allowed: np.ndarray, towards: int) -> np.ndarray:
    moved = np.zeros_like(allowed)
    if towards > 0:
        moved[..., 1:] = allowed[..., :-1]
    else:
        moved[..., :-1] = allowed[..., 1:]
    return moved


def _without_itself(allowed: np.ndarray) -> np.ndarray:
    return allowed & ~np.eye(*allowed.shape[-2:], dtype=bool)


def _other_corner(allowed: np.ndarray) -> np.ndarray:
    T, S = allowed.shape[-2:]
    return np.tri(T, S, S - T, dtype=bool)


def _causal_or_padding(allowed: np.ndarray) -> np.ndarray:
    """Of a causal mask and lengths: the last query sees all keys that are real."""
    return np.tri(*allowed.shape[-2:], dtype=bool) | allowed[..., -1:, :]


def _own_piece(allowed: np.ndarray) -> np.ndarray:
    """What lies in the cache is not seen."""
    T = allowed.shape[-1]
    at = np.arange(T)
    piece = np.where(at < first_piece(T), 0, at + 1)
    return allowed & (piece[:, None] == piece)


def _reads(**sources: str) -> Plants:
    """Projections with the weights of others: q="k"."""

    def change(p: Problem) -> Problem:
        w = p.weights
        read = {
            f"{to}.{part}": w[f"{of}.{part}"]
            for to, of in sources.items()
            for part in ("weight", "bias")
            if f"{of}.{part}" in w
        }
        return replace(p, weights=w | read)

    return _given(change)


def _transposed(name: str) -> Plants:
    key = f"{name}.weight"
    return _given(lambda p: replace(p, weights=p.weights | {key: p.weights[key].mT}))


def _each(kind: type, change: Callable) -> Plants:
    """Every step of that kind after the projections, changed."""

    def mutate(p: Problem) -> Problem:
        return replace(p, after=tuple(change(s) if isinstance(s, kind) else s for s in p.after))

    return _given(mutate)


def _rounded(x: Tensor, bits: int) -> Tensor:
    """To `bits` bits of significand; its gradient as if it were not."""
    mantissa, exponent = torch.frexp(x.detach())
    near = torch.ldexp(torch.round(mantissa * 2.0**bits) / 2.0**bits, exponent)
    return x + (near - x.detach())


def _summed(right: Callable, p: Problem, a: Tensor, b: Tensor, bits: int) -> Tensor:
    """A product whose every partial sum is rounded."""
    exact, total = right(p, a, b), 0.0
    for i in range(a.shape[-1]):
        term = a.detach()[..., i : i + 1] * b.detach()[..., i : i + 1, :]
        total = _rounded(total + term, bits)
    return exact + (total - exact.detach())


def _narrow(bits: int) -> Plants:
    """Parameters of another dtype."""
    return _given(
        lambda p: replace(p, weights={k: _rounded(x, bits) for k, x in p.weights.items()})
    )


def _scaled(by: Callable[[Problem, float], float]) -> Plants:
    return {"scale": lambda right, p: by(p, right(p))}


def _stopped(name: str) -> Plants:
    return {"branch": lambda right, p, n, x: x.detach() if n == name else x}


def _one_head_sends(right: Callable, p: Problem, x: Tensor) -> Tensor:
    """Of the query heads that share a key/value head the first alone sends it a gradient."""
    first = torch.arange(p.num_heads) % (p.num_heads // p.num_kv_heads) == 0
    read = right(p, x)
    return torch.where(first[:, None, None], read, read.detach())


def _rolled_heads(right: Callable, p: Problem, y: Tensor, heads: int) -> Tensor:
    """Query, key and value heads in one other order, which the output's kernel does not have."""
    G = heads // p.num_kv_heads
    return right(p, y, heads).roll(1 if p.num_kv_heads == 1 < heads else G, dims=1)


def _plus_one(right: Callable, p: Problem, scores: Tensor) -> Tensor:
    """A softmax with 1 more in its denominator."""
    zero = torch.zeros_like(scores[..., :1])
    return right(p, torch.cat([scores, zero], dim=-1))[..., :-1]


def _mean_where_empty(right: Callable, p: Problem, scores: Tensor) -> Tensor:
    empty = scores.isneginf().all(-1, keepdim=True)
    return right(p, scores.masked_fill(empty, 0.0))


def _finite_mask(right: Callable, p: Problem, scores: Tensor) -> Tensor:
    """-1e4 is added where -inf belongs."""
    seen = right(replace(p, allowed=None), scores)
    return torch.where(torch.tensor(p.allowed), seen, seen - 1e4)


def _dropping(right: Callable, p: Problem, weights: Tensor) -> Tensor:
    """Every tenth weight, and the others the larger for it."""
    kept = torch.arange(weights.numel()).reshape(weights.shape) % 10 != 0
    return right(p, weights) * kept / 0.9


_PROBABILITIES = {
    bits: {"softmax": lambda right, p, s, bits=bits: _rounded(right(p, s), bits)}
    for bits in (8, 11)
}
_SUMS = {bits: {"product": partial(_summed, bits=bits)} for bits in (8, 11)}

_CAUSAL = _all(_several, _any_mask("causal"))
_BAND = _all(_several, _any_mask("window", "sliding"))
_PLAIN, _NONE = ("plain_mha", "none"), ("gqa", "none")
_ROTARY = ("gqa/rotary", "causal")
_PIECES = ("gqa/cached", "causal")

MUTANTS: dict[str, Mutant] = {
    # Who sees whom.
    "mask polarity": Mutant(
        _masked(np.logical_not),
        ("gqa", "per_head"),
        lambda c, p, u: p.allowed is not None and c.mask != "padding",
    ),
    "padding polarity": Mutant(
        _masked(np.logical_not), ("torch_mha", "padding"), _any_mask("padding")
    ),
    "mask ignored": Mutant(_masked(lambda allowed: None), ("masked_mha", "per_head"), _hides),
    "attention and padding masks or-ed": Mutant(
        _masked(_causal_or_padding),
        ("gqa", "causal_padding"),
        lambda c, p, u: c.mask == "causal_padding" and 1 < c.size.T == c.size.S,
    ),
    "mask off by one key": Mutant(
        _masked(_later),
        ("gqa", "window"),
        _all(_several, _any_mask("causal", "window", "sliding")),
    ),
    "causal: the next key too": Mutant(
        _masked(partial(_longer, towards=1)), ("weights_mha", "causal"), _CAUSAL
    ),
    "causal: not the own key": Mutant(
        _masked(_without_itself), ("torch_mha", "causal"), _any_mask("causal", "sliding")
    ),
    "causal: the other corner": Mutant(
        _masked(_other_corner),
        ("gqa", "causal"),
        lambda c, p, u: c.mask == "causal" and c.size.T != c.size.S,
    ),
    "window one key longer": Mutant(
        _masked(partial(_longer, towards=-1)), ("gqa", "sliding"), _BAND
    ),
    "the past ignored": Mutant(
        _masked(_own_piece),
        _PIECES,
        _all(_several, _cached("cached", "cached_rotary"), _any_mask("causal", "sliding")),
    ),
    "-1e4 for -inf": Mutant(
        {"hidden": _finite_mask}, ("masked_mha", "empty_row"), _any_mask("empty_row")
    ),
    "a row that sees nothing: the mean of all": Mutant(
        {"softmax": _mean_where_empty}, ("mqa", "empty_row"), _any_mask("empty_row")
    ),
    # What is added to the scores.
    "bias sign": Mutant(
        _given(lambda p: replace(p, bias=-p.bias)),
        ("gqa", "bias"),
        _all(_several, _any_mask("bias")),
    ),
    "bias ignored": Mutant(
        _given(lambda p: replace(p, bias=None)),
        ("torch_mha", "bias"),
        _all(_several, _any_mask("bias")),
    ),
    "bias before the scale": Mutant(
        _given(lambda p: replace(p, bias=p.bias * head_size(p) ** -0.5)),
        ("torch_mha", "bias"),
        _all(_several, _any_mask("bias")),
    ),
    # Weights.
    "query and key swapped": Mutant(
        _reads(q="k", k="q"), ("torch_mha", "causal"), _all(_several, _alike("q", "k"))
    ),
    "key and value swapped": Mutant(_reads(k="v", v="k"), _PLAIN, _alike("k", "v")),
    "keys for values": Mutant(_reads(v="k"), ("weights_mha", "none"), _alike("k", "v")),
    "packed in another order": Mutant(
        _reads(q="k", k="v", v="q"),
        ("fused_mha", "none"),
        lambda c, p, u: c.family in ("fused_mha", "torch_mha") and _alike(*"qkv")(c, p, u),
    ),
    "query kernel untransposed": Mutant(
        _transposed("q"), ("masked_mha", "none"), _all(_several, _square("q"))
    ),
    "output kernel untransposed": Mutant(_transposed("o"), ("masked_mha", "none"), _square("o")),
    "biases dropped": Mutant(
        {"biased": lambda right, p, name, y: y}, ("torch_mha", "none"), _weight("q.bias")
    ),
    "biases doubled": Mutant(
        {"biased": lambda right, p, name, y: right(p, name, right(p, name, y))},
        _NONE,
        _weight("q.bias"),
    ),
    "value bias dropped": Mutant(
        {"biased": lambda right, p, name, y: y if name == "v" else right(p, name, y)},
        ("torch_mha", "padding"),
        _weight("v.bias"),
    ),
    "output bias dropped": Mutant(
        {"biased": lambda right, p, name, y: y if name == "o" else right(p, name, y)},
        ("mqa", "none"),
        _weight("o.bias"),
    ),
    # Heads.
    "heads tiled instead of repeated": Mutant(
        {"shared": lambda right, p, x: x.repeat(1, p.num_heads // p.num_kv_heads, 1, 1)},
        _NONE,
        _grouped,
    ),
    "key/value heads rolled": Mutant(
        {"shared": lambda right, p, x: right(p, x.roll(1, dims=1))},
        _NONE,
        lambda c, p, u: p.num_kv_heads > 1,
    ),
    "heads in another order than the output's": Mutant(
        {"split": _rolled_heads}, _PLAIN, _tells_heads
    ),
    "features split into heads the wrong way round": Mutant(
        {"split": lambda right, p, y, n: y.unflatten(-1, (-1, n)).permute(0, 3, 1, 2)},
        _PLAIN,
        lambda c, p, u: _tells_heads(c, p, u) and head_size(p) > 1,
    ),
    # Scores.
    "scale 1% too large": Mutant(
        _scaled(lambda p, s: 1.01 * s), ("weights_mha", "none"), _all(_several, _at(FINE))
    ),
    "scale 1% too small": Mutant(
        _scaled(lambda p, s: 0.99 * s), ("fused_mha", "none"), _all(_several, _at(FINE))
    ),
    "scale by one feature more": Mutant(
        _scaled(lambda p, s: s * (head_size(p) / (head_size(p) + 1)) ** 0.5),
        _PLAIN,
        _all(_several, _at(FINE)),
    ),
    "scale by all features": Mutant(
        _scaled(lambda p, s: s * p.num_heads**-0.5),
        _PLAIN,
        lambda c, p, u: _several(c, p, u) and p.num_heads > 1,
    ),
    "scale twice": Mutant(_scaled(lambda p, s: s * s), _PLAIN, _several),
    "no scale": Mutant(_scaled(lambda p, s: 1.0), _PLAIN, _several),
    "softmax over the queries": Mutant(
        {"softmax": lambda right, p, s: right(p, s.mT).mT},
        _PLAIN,
        lambda c, p, u: c.size.T > 1,
    ),
    "softmax with 1 more below": Mutant({"softmax": _plus_one}, _PLAIN, _always),
    "softcap ignored": Mutant(
        _given(lambda p: replace(p, softcap=None)),
        ("gqa/softcap", "none"),
        lambda c, p, u: p.softcap is not None and u in FINE,
    ),
    "softcap after the mask": Mutant(
        {"capped": lambda right, p, s: s, "hidden": lambda right, p, s: capped(p, right(p, s))},
        ("gqa/softcap", "causal"),
        lambda c, p, u: p.softcap is not None and _hides(c, p, u),
    ),
    # Precision.
    "probabilities in bfloat16": Mutant(_PROBABILITIES[8], _PLAIN, _all(_several, _at(SINGLE))),
    "probabilities in float16": Mutant(_PROBABILITIES[11], _PLAIN, _all(_several, _at(SINGLE))),
    "sums in bfloat16": Mutant(_SUMS[8], _PLAIN, _at(SINGLE)),
    "sums in float16": Mutant(_SUMS[11], _PLAIN, _at(SINGLE)),
    "parameters in bfloat16": Mutant(_narrow(8), _PLAIN, _at(SINGLE)),
    "parameters in float16": Mutant(_narrow(11), _PLAIN, _at(SINGLE)),
    "products in TF32": Mutant(
        {"product": lambda right, p, a, b: right(p, _rounded(a, 11), _rounded(b, 11))},
        _PLAIN,
        _at(SINGLE),
    ),
    # Positions and norms.
    "rotary pairs of the other convention": Mutant(
        _each(Turn, lambda turn: replace(turn, interleaved=not turn.interleaved)),
        ("gqa/rotary_interleaved_partial", "padding"),
        _all(_several, _steps(Turn)),
    ),
    "rotary base doubled": Mutant(
        _each(Turn, lambda turn: replace(turn, base=2 * turn.base)),
        _ROTARY,
        _all(_several, _steps(Turn), _at(FINE)),
    ),
    "queries a position too far": Mutant(
        _each(Turn, lambda turn: replace(turn, first=turn.first + 1)),
        ("gqa/cached_rotary", "causal"),
        _all(_several, _steps(Turn)),
    ),
    "the other norm": Mutant(
        _each(Norm, lambda norm: replace(norm, centred=not norm.centred)),
        ("gqa/qk_layer_norm", "causal"),
        _all(_several, _steps(Norm)),
    ),
    "norm with another epsilon": Mutant(
        _each(Norm, lambda norm: replace(norm, epsilon=norm.epsilon / 10)),
        ("gqa/qk_norm", "none"),
        _all(_several, _steps(Norm), _at(SINGLE)),
    ),
    "norm after rotary": Mutant(
        _given(lambda p: replace(p, after=p.after[::-1])),
        ("gqa/qk_norm", "none"),
        _all(_several, _steps(Norm, Turn)),
    ),
    # Dropout.
    "dropout where none belongs": Mutant(
        {"dropped": _dropping}, _PLAIN, lambda c, p, u: p.kept is None
    ),
    "dropout without 1/keep": Mutant(
        {"dropped": lambda right, p, w: w * torch.tensor(p.kept > 0)},
        ("gqa/dropout", "dropout"),
        lambda c, p, u: p.kept is not None,
    ),
    "kept and dropped swapped": Mutant(
        {"dropped": lambda right, p, w: w * torch.tensor(np.where(p.kept > 0, 0, p.kept.max()))},
        ("gqa/dropout", "dropout"),
        lambda c, p, u: p.kept is not None,
    ),
    # Gradients.
    "gradient stopped at the queries": Mutant(_stopped("q"), _PLAIN, _several),
    "gradient stopped at the keys": Mutant(_stopped("k"), ("gqa", "window"), _several),
    "gradient stopped at the values": Mutant(_stopped("v"), _PLAIN, _always),
    "gradients of a group not summed": Mutant(
        {"shared": _one_head_sends}, _NONE, lambda c, p, u: p.num_kv_heads < p.num_heads
    ),
    # The cache.
    "cached values in another order than keys": Mutant(
        {"slots": lambda right, p, v: right(p, v.roll(1, dims=-2))},
        _PIECES,
        _all(_several, _cached("cached", "cached_ragged", "cached_rotary")),
    ),
}
