"""Canaries of epsilons, whose effect large activations and large denominators hide.

Norms get another default epsilon; denominators get none.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch._ops import OpOverload

from jax_attn.parity.bugs.bug import Bug, OperatorCall, Site, arguments, is_number
from jax_attn.parity.bugs.layers import NORMS
from jax_attn.parity.bugs.planting import Planted, run_planted
from jax_attn.parity.checking.canaries.findings import FINE, inside, not_tried
from jax_attn.parity.checking.canaries.seen import is_seen
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.budget import PRECISIONS
from jax_attn.parity.judge.finding import Finding, Findings, StandingNote
from jax_attn.parity.run.modes.constants import Kwargs

_ROOTS = ("rsqrt", "sqrt", "pow")
# The root of a sum with a second term this small belongs to a norm that is written out.
_LARGEST = 1e-3
_MARK = "_epsilon_added"
# operator -> which of its arguments is the denominator
_DIVISORS = {"div": 1, "reciprocal": 0}
# The defaults of torch and of flax.
_TORCH, _FLAX = 1e-5, 1e-6
# The number of norms tried one at a time: those whose result another epsilon changes least.
ALONE = 3
# A change of a norm's result by this many roundoffs is also seen downstream.
_SEEN = 64


def _other(epsilon: float) -> float:
    """Return another default epsilon: flax's, or torch's if `epsilon` is not above flax's."""
    return _TORCH if epsilon <= _FLAX else _FLAX


class _Epsilons(Planted):
    """Float64 in which a sum keeps an epsilon that is its second term as an attribute."""

    def dispatched(self, func: OpOverload, args: tuple, kwargs: Kwargs) -> Any:
        result = super().dispatched(func, args, kwargs)
        is_sum = func.overloadpacket.__name__ in ("add", "add_")
        if is_sum and isinstance(args[1], float) and 0 < args[1] <= _LARGEST:
            setattr(result, _MARK, args[1])
        return result


def _other_epsilon(call: OperatorCall) -> Bug | None:
    """Return the bug of a norm's call that has another default epsilon."""
    if call.name in NORMS:
        at = NORMS[call.name]
        epsilon = call.args[at] if at < len(call.args) else None
        wrong = epsilon and _other(epsilon)
    else:
        power = call.args[1] if call.name == "pow" else 0.5
        is_root = is_number(power) and abs(float(power)) == 0.5
        at, epsilon = 0, getattr(call.args[0], _MARK, None) if is_root else None
        wrong = epsilon and call.args[0] + (_other(epsilon) - epsilon)
    if not epsilon:
        return None
    return Bug("epsilon", "another epsilon", arguments({at: wrong}), epsilon)


def _no_epsilon(call: OperatorCall) -> Bug | None:
    """Return the bug of a quotient whose denominator lacks its epsilon."""
    at = _DIVISORS[call.name]
    epsilon = getattr(call.args[at], _MARK, None) if at < len(call.args) else None
    if not epsilon:
        return None
    return Bug("epsilon", "no epsilon", arguments({at: call.args[at] - epsilon}), epsilon)


_other_epsilons: Callable[..., Planted] = partial(_Epsilons, (*NORMS, *_ROOTS), _other_epsilon)
_no_epsilons: Callable[..., Planted] = partial(_Epsilons, tuple(_DIVISORS), _no_epsilon)


def try_epsilons(prepared: Prepared) -> Findings:
    """Note norms whose other default epsilon, and denominators whose lack of one, is not seen."""
    if prepared.dtype not in FINE:
        return Findings()
    return Findings(notes=(*_of_norms(prepared), *_of_denominators(prepared)))


def _of_norms(prepared: Prepared) -> Iterator[Finding]:
    mode = _other_epsilons()
    run = run_planted(prepared.reference, mode)
    if not mode.effects:
        return
    seen = run and (prepared.would_fail(run) or is_seen(prepared, _other_epsilons))
    if seen is None:
        yield not_tried(f"a wrong epsilon of a norm{inside([site.path for site in mode.effects])}")
        return
    roundoff = PRECISIONS[prepared.dtype].store
    hidden: dict[float, list[tuple[str | None, float]]] = {}
    shown: dict[Site, float] = {}
    for site, (epsilon, moved) in mode.effects.items():
        if moved < roundoff or not seen:
            hidden.setdefault(epsilon, []).append((site.path, moved))
        else:
            shown[site] = moved
    yield from (_note(epsilon, norms, roundoff) for epsilon, norms in hidden.items())
    if len(mode.effects) > 1:
        yield from _of_one_norm(prepared, sorted(shown, key=shown.__getitem__))


def _of_one_norm(prepared: Prepared, norms: list[Site]) -> Iterator[Finding]:
    """Try single norms. The notes are standing: in most models, other terms drown some norms."""
    seen = [is_seen(prepared, partial(_other_epsilons, at=norm)) for norm in norms[:ALONE]]
    unseen = [norm.path for norm, shows in zip(norms, seen, strict=False) if shows is False]
    if len(norms) > ALONE:
        yield StandingNote(
            "few-tried",
            f"a wrong epsilon of one norm alone was tried in {ALONE} of {len(norms)}: those whose "
            f"result it changes least{', and in each of them it shows' if all(seen) else ''}; to "
            f"try the others, check parts of the model with at most {ALONE} norms each",
        )
    if unseen:
        yield StandingNote(
            "epsilon-alone",
            f"a port with a wrong epsilon in one norm alone{inside(unseen)} would pass, since "
            "rounding hides it; to show it, use smaller activations there",
        )


def _of_denominators(prepared: Prepared) -> Iterator[Finding]:
    """Try denominators. The notes are standing: inputs can rarely make one as small as epsilon."""
    mode = _no_epsilons()
    run_planted(prepared.reference, mode)
    paths: dict[float, list[str | None]] = {}
    for site, effect in mode.effects.items():
        paths.setdefault(effect.value, []).append(site.path)
    seen = is_seen(prepared, _no_epsilons) if paths else True
    for epsilon, at in () if seen else paths.items():
        quotient = f"without the epsilon of {epsilon:g} in a denominator{inside(at)}"
        if seen is None:
            yield not_tried(f"a port {quotient}")
        else:
            yield StandingNote(
                "epsilon-of-denominator",
                f"a port {quotient} would pass: the denominators are too large for it to show",
            )


def _note(epsilon: float, norms: list[tuple[str | None, float]], roundoff: float) -> Finding:
    """Note norms whose epsilon is hidden.

    norms: paths, and the relative change by another epsilon: half its share of the variance."""
    change = abs(_other(epsilon) - epsilon)
    where = inside([path for path, _ in norms])
    most = max(moved for _, moved in norms)
    have = f"an RMS of at least {math.sqrt(change / (2 * most)):.2g}" if most > 0 else "a huge RMS"
    need = math.sqrt(change / (2 * _SEEN * roundoff))
    return Finding(
        "epsilon",
        f"a wrong epsilon of a norm{where} would pass: with activations of "
        f"{have}, {_other(epsilon):g} in place of {epsilon:g} gives the same outputs; to show "
        f"it, use activations with an RMS of {need:.2g} or less, on which the outputs depend",
    )
