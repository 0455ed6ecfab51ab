"""Conventions: derivatives exactly at a kink, which of equal numbers a maximum takes, and what a
query gets that sees no key.

Padding and branches initialised to zero give such numbers. The reference is run with what the usual
JAX expressions give there, for `by_convention` to compare a port with.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from jax_attn.parity.bugs.bug import HIDES, Bug, OperatorCall
from jax_attn.parity.bugs.planting import Planted, Watched, run_planted
from jax_attn.parity.checking.by_convention import Convention
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.checking.ties import TIES, Other
from jax_attn.parity.run.inputs_and_runs import Run
from jax_attn.parity.run.modes.lines import calling_line


class Kink(NamedTuple):
    """An operator that bends. at: where its arguments are at a bend. torchs, jaxs: the derivative
    there in torch, and in the JAX expression `usual`. remedy: an expression with torch's."""

    at: Callable[..., torch.Tensor]
    torchs: Callable[..., float]
    jaxs: float
    usual: str
    remedy: str


def _at_zero(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x == 0


def _at_bounds(x: torch.Tensor, low: Any = None, high: Any = None, **named: Any) -> torch.Tensor:
    bounds = [named.get("min", low), named.get("max", high)]
    at = torch.zeros_like(x, dtype=torch.bool)
    for bound in bounds:
        at = at if bound is None else at | (x == bound)
    return at


def _slope(x: Any, negative_slope: float = 0.01, *_: Any, **__: Any) -> float:
    return negative_slope


_CLIP = "jnp.where((x >= low) & (x <= high), x, lax.stop_gradient(jnp.clip(x, low, high)))"
_INSIDE = "jnp.where((x > low) & (x < high), x, lax.stop_gradient(jnp.clip(x, low, high)))"
_ABS = Kink(_at_zero, lambda *_, **__: 0.0, 1.0, "jnp.abs(x)", "jnp.sign(x) * x")
_CLAMP = Kink(_at_bounds, lambda *_, **__: 1.0, 0.5, "jnp.clip or jnp.maximum", _CLIP)
KINKS = {
    "abs": _ABS,
    "clamp": _CLAMP,
    "clamp_min": _CLAMP,
    "hardtanh": Kink(
        lambda x, low=-1.0, high=1.0, *_, **named: _at_bounds(
            x, named.get("min_val", low), named.get("max_val", high)
        ),
        lambda *_, **__: 0.0,
        0.5,
        "jnp.clip",
        _INSIDE,
    ),
    "leaky_relu": Kink(
        _at_zero, _slope, 1.0, "jax.nn.leaky_relu(x, slope)", "jnp.where(x > 0, x, slope * x)"
    ),
    "relu": Kink(_at_zero, lambda *_, **__: 0.0, 0.5, "jnp.maximum(x, 0)", "jax.nn.relu(x)"),
}
"""Operator -> its kink."""
_SPELLINGS = {
    "__abs__": "abs",
    "absolute": "abs",
    "adaptive_max_pool1d": "adaptive_max_pool2d",
    "argsort": "sort",
    "clip": "clamp",
    "leaky_relu_": "leaky_relu",
    "max_pool1d": "max_pool2d_with_indices",
    "max_pool2d": "max_pool2d_with_indices",
    "max_pool3d": "max_pool3d_with_indices",
}
"""The name of a function -> the operator that it calls."""


# --- queries without keys -------------------------------------------------------------------------

_SOFTMAXES = ("_softmax", "_safe_softmax")
_EMPTY = {
    "weights of 0 in rows without keys": lambda n: 0.0,
    "equal weights without a gradient in rows without keys": lambda n: 1 / n,
}
"""What a port gives a query whose keys are all hidden -> the weight of each of n keys."""


def _empty(call: OperatorCall) -> torch.Tensor:
    """Return which rows of a softmax see no key."""
    scores, axis = call.args[:2]
    return scores.amax(axis, keepdim=True) <= HIDES


def _in_empty_rows(weight: Callable[[int], float]) -> Planted:
    """Return a mode in which rows without keys get one weight, and send no gradient."""

    def forward(call: OperatorCall) -> torch.Tensor:
        return torch.where(_empty(call), weight(call.args[0].shape[call.args[1]]), call.result())

    def backward(call: OperatorCall) -> torch.Tensor:
        weights, axis = call.args[1:3]
        planted = (weights == weight(weights.shape[axis])).all(axis, keepdim=True)
        return torch.where(planted, 0.0, call.result())

    def bug_of(call: OperatorCall) -> Bug | None:
        if call.name in _SOFTMAXES:
            return Bug("empty rows", "", forward) if bool(_empty(call).any()) else None
        return Bug("empty rows", "", backward)

    return Planted((*_SOFTMAXES, "_softmax_backward_data"), bug_of)


# --- the reference's numbers ----------------------------------------------------------------------


@dataclass
class _Met:
    """Counts the numbers at kinks and the ties, by operator and line, and the rows without keys."""

    operators = (*KINKS, *TIES, *_SOFTMAXES)
    empty: int = 0
    counts: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    derivative: dict[str, float] = field(default_factory=dict)

    def look(self, call: OperatorCall) -> None:
        x = call.args[0]
        if call.name in _SOFTMAXES:
            self.empty += int(_empty(call).sum()) if x.numel() and x.ndim else 0
            return
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or not x.numel():
            return
        if call.name in TIES:
            self._add(call.name, *TIES[call.name].ties(*call.args, **call.kwargs))
        elif near := int(KINKS[call.name].at(*call.args, **call.kwargs).sum()):
            self._add(call.name, near, x.numel())
            self.derivative[call.name] = KINKS[call.name].torchs(*call.args, **call.kwargs)

    def _add(self, name: str, near: int, total: int) -> None:
        if near:
            before = self.counts.get(key := (name, calling_line()), (0, 0))
            self.counts[key] = before[0] + near, before[1] + total

    def places(self, name: str) -> Iterator[tuple[int, int, str]]:
        """Yield for each line of an operator the numbers at its kink, all its numbers, the line."""
        for (operator, line), (near, total) in self.counts.items():
            if operator == name:
                yield near, total, line


class _JaxsDerivatives(TorchFunctionMode):
    """Gives operators JAX's derivative at kinks and ties. It sees calls before autograd does."""

    def __init__(self, kinks: frozenset[str], ties: Mapping[str, Other]):
        super().__init__()
        self._kinks, self._ties = kinks, ties

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        result = func(*args, **named)
        name = getattr(func, "__name__", "")
        name = _SPELLINGS.get(name, name)
        if name in ("max", "min") and len(args) > 1 and isinstance(args[1], torch.Tensor):
            name += "imum"
        x = args[0] if args else None
        if not isinstance(x, torch.Tensor) or result is x:
            return result
        if name in self._ties:
            return self._ties[name].result(result, *args, **named)
        if name not in self._kinks:
            return result
        kink = KINKS[name]
        by = kink.jaxs - kink.torchs(*args, **named)
        return result + by * kink.at(*args, **named) * (x - x.detach())


def conventions(prepared: Prepared) -> tuple[Convention, ...]:
    """Find numbers at kinks and rows without keys, and run the reference by other conventions."""
    met = _Met()
    if not prepared.gradients or run_planted(prepared.reference, Watched(met)) is None:
        return ()
    return tuple(_others(prepared, met))


def _others(prepared: Prepared, met: _Met) -> Iterator[Convention]:
    at_kinks = {name: "; ".join(_at_kink(name, met)) for name in met.derivative}
    tied = {name: TIES[name].others for name, _ in met.counts if name in TIES}
    alone: list[tuple[tuple[str, ...], dict[str, Other]]] = [
        *(((name,), {}) for name in at_kinks),
        *(((), {name: other}) for name, others in tied.items() for other in others),
    ]
    every = (tuple(at_kinks), {name: others[0] for name, others in tied.items()})
    for names, ties in (*alone, *([every] if len(alone) > 1 else [])):
        if (run := _by_jax(prepared, names, ties)) is not None:
            said = [at_kinks[name] for name in names]
            said += [line for name, other in ties.items() for line in _at_tie(name, other, met)]
            sentence = f"other derivatives: {'; '.join(said)}"
            yield Convention.of("kink", sentence, run, prepared.exact)
    for name, weight in _EMPTY.items() if met.empty else ():
        planted = _in_empty_rows(weight)
        run = run_planted(prepared.reference, planted, prepared.cotangents)
        if run is not None:
            sentence = (
                f"{name} ({met.empty} of them), where what a reference gives is a convention; a "
                "mask that leaves each query a key, or outputs without these queries, show the "
                "rest alone"
            )
            yield Convention.of("empty-rows", sentence, run, prepared.exact)


def _at_kink(name: str, met: _Met) -> Iterator[str]:
    kink = KINKS[name]
    for near, total, line in met.places(name):
        yield (
            f"{near} of {total} arguments of {name} ({line}) lie exactly at its kink, where "
            f"torch's derivative is {met.derivative[name]:g} and that of {kink.usual} is "
            f"{kink.jaxs:g}; {kink.remedy} has torch's"
        )


def _at_tie(name: str, other: Other, met: _Met) -> Iterator[str]:
    tie = TIES[name]
    for near, total, line in met.places(name):
        yield (
            f"{near} of {total} results of {name} ({line}) come from equal numbers, where torch's "
            f"gradient goes to {tie.torchs} and that of {other.usual} to {other.goes_to}; "
            f"{tie.remedy}"
        )


def _by_jax(prepared: Prepared, kinks: tuple[str, ...], ties: Mapping[str, Other]) -> Run | None:
    own = prepared.reference.call or torch.nn.Module.__call__

    def call(module: torch.nn.Module, *args: Any, **inputs: Any) -> Any:
        with _JaxsDerivatives(frozenset(kinks), ties):
            return own(module, *args, **inputs)

    return run_planted(prepared.reference.called(call), cotangents=prepared.cotangents)
