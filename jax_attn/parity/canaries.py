"""Canaries: the oracle with one thing wrong, to show that a row would have seen it.

A row claims to catch certain bugs. Each claim is tried on the oracle, at no compilation: its
mutant goes through the comparison in the port's place, and must fail. A row whose canary
lives has not shown what it says, and is INCONCLUSIVE.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from jax_attn.parity.cases import Case
from jax_attn.parity.oracle import Norm, Problem, Turn, softmax

_FINE = {"float64", "float32", "float16"}  # precisions finer than bfloat16's


def _weights(problem: Problem, **changed: np.ndarray) -> Problem:
    renamed = {name.replace("_", "."): value for name, value in changed.items()}
    return replace(problem, weights=problem.weights | renamed)


def _bfloat16_softmax(scores_TS: np.ndarray) -> np.ndarray:
    """Probabilities rounded to 8 bits of significand."""
    mantissa, exponent = np.frexp(softmax(scores_TS))
    return np.ldexp(np.round(mantissa * 2**8) / 2**8, exponent)


def _shifted(problem: Problem) -> Problem:
    """Every query sees what it should, moved one key to the right."""
    allowed = np.array(problem.allowed)
    allowed[..., 1:] = problem.allowed[..., :-1]
    return replace(problem, allowed=allowed)


def _longer(problem: Problem) -> Problem:
    """Every query sees one key more, to the left of the others."""
    allowed = np.array(problem.allowed)
    allowed[..., :-1] |= problem.allowed[..., 1:]
    return replace(problem, allowed=allowed)


def _without_biases(problem: Problem) -> Problem:
    weights = {k: v for k, v in problem.weights.items() if not k.endswith("bias")}
    zeros = {k: np.zeros_like(v) for k, v in problem.weights.items() if k.endswith("bias")}
    return replace(problem, weights=weights | zeros)


def _transposed(problem: Problem) -> Problem:
    return _weights(problem, q_weight=problem.weights["q.weight"].T)


def _swapped(problem: Problem) -> Problem:
    w = problem.weights
    changed = {"k_weight": w["v.weight"], "v_weight": w["k.weight"]}
    if "k.bias" in w:
        changed |= {"k_bias": w["v.bias"], "v_bias": w["k.bias"]}
    return _weights(problem, **changed)


def _rescaled(problem: Problem) -> Problem:
    size = problem.weights["q.weight"].shape[0] // problem.num_heads
    scale = size**-0.5 if problem.scale is None else problem.scale
    return replace(problem, scale=1.01 * scale)


def _each(kind: type, change: Callable) -> Callable[[Problem], Problem]:
    """Every step of that kind after the projections, changed."""

    def mutate(problem: Problem) -> Problem:
        steps = (change(step) if isinstance(step, kind) else step for step in problem.after)
        return replace(problem, after=tuple(steps))

    return mutate


@dataclass(frozen=True)
class Canary:
    """mutate: the wrong oracle. claimed: whether a row, at a precision, says it would see it."""

    mutate: Callable[[Problem], Problem]
    claimed: Callable[[Case, Problem, str], bool]


def _several_keys(case: Case) -> bool:
    """With one key the softmax is 1 whatever the scores: queries and keys do not matter."""
    return case.size.S > 1


def _has(problem: Problem, *kinds: type) -> bool:
    return {*kinds} <= {type(step) for step in problem.after}


CANARIES = {
    "query kernel transposed": Canary(
        _transposed,
        lambda c, p, u: _several_keys(c) and np.equal(*p.weights["q.weight"].shape),
    ),
    "key and value swapped": Canary(
        _swapped, lambda c, p, u: p.weights["k.weight"].shape == p.weights["v.weight"].shape
    ),
    "scale off by 1%": Canary(_rescaled, lambda c, p, u: _several_keys(c) and u in _FINE),
    "mask polarity": Canary(
        lambda p: replace(p, allowed=~p.allowed), lambda c, p, u: p.allowed is not None
    ),
    "mask off by one key": Canary(
        _shifted, lambda c, p, u: _several_keys(c) and c.mask in ("causal", "window", "sliding")
    ),
    "window one key longer": Canary(
        _longer, lambda c, p, u: _several_keys(c) and c.mask in ("window", "sliding")
    ),
    "bias sign": Canary(
        lambda p: replace(p, bias=-p.bias), lambda c, p, u: _several_keys(c) and c.mask == "bias"
    ),
    "heads tiled instead of repeated": Canary(
        lambda p: replace(p, kv_head=lambda n, heads, kv: n % kv),
        lambda c, p, u: 1 < p.num_kv_heads < p.num_heads,
    ),
    "biases dropped": Canary(_without_biases, lambda c, p, u: "q.bias" in p.weights),
    "softmax in bfloat16": Canary(
        lambda p: replace(p, softmax=_bfloat16_softmax),
        lambda c, p, u: _several_keys(c) and u in ("float32", "float64"),
    ),
    "gradient stopped at the keys": Canary(
        lambda p: replace(p, stopped=frozenset("k")), lambda c, p, u: _several_keys(c)
    ),
    "softcap ignored": Canary(
        lambda p: replace(p, softcap=None), lambda c, p, u: p.softcap is not None and u in _FINE
    ),
    "rotary pairs of the other convention": Canary(
        _each(Turn, lambda turn: replace(turn, interleaved=not turn.interleaved)),
        lambda c, p, u: _several_keys(c) and _has(p, Turn),
    ),
    "rotary base doubled": Canary(
        _each(Turn, lambda turn: replace(turn, base=2 * turn.base)),
        lambda c, p, u: _several_keys(c) and _has(p, Turn) and u in _FINE,
    ),
    "queries a position too far": Canary(
        _each(Turn, lambda turn: replace(turn, first=turn.first + 1)),
        lambda c, p, u: _several_keys(c) and _has(p, Turn),
    ),
    "the other norm": Canary(
        _each(Norm, lambda norm: replace(norm, centred=not norm.centred)),
        lambda c, p, u: _several_keys(c) and _has(p, Norm),
    ),
    "norm after rotary": Canary(
        lambda p: replace(p, after=p.after[::-1]),
        lambda c, p, u: _several_keys(c) and _has(p, Norm, Turn),
    ),
}
