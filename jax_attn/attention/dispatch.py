"""Which kernel runs, and why not the others."""

import dataclasses
from collections.abc import Callable, Mapping

import jax

from jax_attn.attention import blocked, checks, dense
from jax_attn.attention.call import Call


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A way to compute attention.

    run: Call → (B, T, N, Hv). refusals: Call, its arrays maybe abstract → every reason why run
    cannot serve it. drawbacks: likewise, why another is to be preferred that can. why: what
    speaks for it where it is chosen.
    """

    run: Callable[[Call], jax.Array]
    refusals: Callable[[Call], list[str]]
    drawbacks: Callable[[Call], list[str]]
    why: str


def none(call: Call) -> list[str]:
    """No reason at all."""
    del call
    return []


# In the order in which they are tried.
KERNELS: Mapping[str, Kernel] = {
    "blocked": Kernel(
        blocked.attention,
        refusals=blocked.refusals,
        drawbacks=blocked.drawbacks,
        why="works tile by tile and holds no T×S array; no forward mode (jvp)",
    ),
    "dense": Kernel(
        dense.attention,
        refusals=none,
        drawbacks=none,
        why="writes every score out and serves any call",
    ),
}


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """What would run, and why not the others.

    chosen: the kernel's name, or None when the one insisted on cannot serve the call.
    why: what speaks for it. refusals: every reason of each kernel that is not chosen.
    """

    chosen: str | None
    why: str
    refusals: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        lines = [f"{self.chosen or 'nothing'} runs: {self.why}"]
        for name, reasons in self.refusals.items():
            lines += [f"  not {name}: {reason}" for reason in reasons]
        return "\n".join(lines)

    __repr__ = __str__


def name_problems(implementation) -> list[str]:
    """What is wrong with the name of a kernel."""
    if implementation is None or implementation in KERNELS:
        return []
    known = ", ".join(map(repr, KERNELS))
    return [f"implementation: expected None or one of {known}, got {implementation!r}"]


def explain(call: Call, implementation: str | None) -> Explanation:
    """The one kernel insisted on if it can serve the call, else the first that is best for it."""
    reasons = {name: tuple(kernel.refusals(call)) for name, kernel in KERNELS.items()}
    if implementation is not None:
        if reasons[implementation]:
            why = f"implementation={implementation!r} is insisted on and cannot serve the call"
            return Explanation(None, why, {implementation: reasons[implementation]})
        chosen, preferred = implementation, f"{implementation} is insisted on"
    else:
        for name, kernel in KERNELS.items():
            reasons[name] = reasons[name] or tuple(kernel.drawbacks(call))
        chosen = next(name for name in KERNELS if not reasons[name])
        preferred = f"{chosen} comes first"
    others = {name: why or (preferred,) for name, why in reasons.items() if name != chosen}
    return Explanation(chosen, KERNELS[chosen].why, others)


def run(call: Call, implementation: str | None) -> jax.Array:
    """Runs the chosen kernel; raises with every reason when the one insisted on cannot."""
    explanation = explain(call, implementation)
    if explanation.chosen is None:
        reasons = [why for whys in explanation.refusals.values() for why in whys]
        checks.raise_all(f"implementation={implementation!r} cannot serve this call", reasons)
    return KERNELS[explanation.chosen].run(call.on_device())
