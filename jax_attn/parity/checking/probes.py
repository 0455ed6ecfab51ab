"""Findings of a check other than the comparison of numbers: a table of probes, each in two halves.

The first half, a question, asks the reference on its inputs, and returns plain arrays and text, or
the `ReferenceSide` of other inputs (`checking.questions`). The second half, here, judges a port by
that answer. It needs neither the torch module nor torch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from jax_attn.parity.checking.frequencies import rounded
from jax_attn.parity.checking.other_inputs import ignored_integers, kept_outputs
from jax_attn.parity.checking.reference_errors import left_out_in_inference
from jax_attn.parity.checking.reference_side import NotAskedError, ReferenceSide
from jax_attn.parity.checking.weights import WeightComparison, Weights, compared
from jax_attn.parity.judge.budget import Budget
from jax_attn.parity.judge.compare import rms
from jax_attn.parity.judge.finding import Finding, Findings, StandingNote
from jax_attn.parity.judge.text import joined, quoted
from jax_attn.parity.run import TRANSFORMS
from jax_attn.parity.run.asked_port import AskedPort, AskedWeights
from jax_attn.parity.run.inputs_and_runs import Inputs


@dataclass(frozen=True)
class PortSide:
    """A port, its transforms, and the comparison of its weights with the reference's.

    beside: for a port on a mesh, the same port on one device. passed_over: the reference's
    parameters whose gradients are not compared.
    """

    port: AskedPort
    transforms: tuple[str, ...]
    weights: WeightComparison
    passed_over: frozenset[str]
    beside: AskedPort | None

    @classmethod
    def of(
        cls,
        prepared: ReferenceSide,
        port: AskedPort,
        transforms: tuple[str, ...],
        weights: AskedWeights | None,
    ) -> Self:
        """Compare the weights. weights: None if no table pairs them."""
        own: Weights = prepared.answer("weights")
        comparison, names = compared(own, weights), prepared.parameters
        passed_over = comparison.passed_over
        passed_over |= frozenset() if names is None else {*own.parameters} - names
        return cls(port, transforms, comparison, passed_over, port.on_one_device())

    @property
    def alone(self) -> AskedPort:
        """The port on one device."""
        return self.beside or self.port


class Probe(NamedTuple):
    """One question of a check.

    judge: (answer, `ReferenceSide`, `PortSide`) -> findings. question: the name of what is asked of
    the reference (`checking.questions`); None if its numbers, or the port's, suffice. when_eager:
    whether it is asked only of a port that runs operation by operation.
    """

    judge: Callable[[Any, ReferenceSide, PortSide], Findings]
    question: str | None = None
    when_eager: bool = False

    def findings(self, prepared: ReferenceSide, side: PortSide) -> Findings:
        """Return the findings on a port."""
        if self.when_eager and "eager" not in side.transforms:
            return Findings()
        try:
            answer = None if self.question is None else prepared.answer(self.question)
        except NotAskedError as which:
            return Findings(notes=(Finding("not-asked", _NOT_ASKED.format(self.question, which)),))
        return self.judge(answer, prepared, side)


_NOT_ASKED = (
    "the reference was not asked for {}, as this version of jax-attn does: {} comes from an older "
    "one; to ask it, capture the reference again"
)


def _weights(_: None, prepared: ReferenceSide, side: PortSide) -> Findings:
    found, names, notes = side.weights, prepared.parameters, side.weights.notes
    if names is not None and found.to_torch and prepared.gradients:
        notes = (*notes, selected(names, len(prepared.answer("weights").parameters)))
    return Findings(failures=found.differences, notes=notes)


def selected(names: frozenset[str], total: int) -> Finding:
    """Return a note that says how many of how many gradients are compared."""
    return Finding(
        "parameters-selected",
        f"the gradients of {len(names)} of {total} parameters were compared: those that the "
        "argument `parameters` selects",
    )


def nothing_cut(port: AskedPort) -> tuple[Finding, ...]:
    """Return a doubt if every device of a mesh computes everything."""
    if not port.facts.is_on_mesh or port.facts.is_cut:
        return ()
    whole = "mesh: nothing is sharded, so every device computes everything; pass specs="
    return (Finding("nothing-cut", whole),)


def _unreached(_: None, prepared: ReferenceSide, side: PortSide) -> Findings:
    kind = "gradient of parameter"
    exact = prepared.exact.kinds[kind]
    compared = {name: exact[name] for name in exact if name not in side.passed_over}
    return Findings(notes=_notes_on_unreached(compared, prepared.budgets[kind]))


def _notes_on_unreached(
    gradients: Mapping[str, np.ndarray], budgets: Mapping[str, Budget]
) -> tuple[Finding, ...]:
    """Return notes on parameters whose gradient is zero, on these inputs or on any (key biases).

    gradients: the oracle's gradients by name. For parameters with three or more axes, such as
    stacked experts, slices along the first axis are examined too.
    """
    notes: list[Finding] = []
    if zero := [name for whole, g in gradients.items() for name in _zero_parts(whole, g)]:
        it, gradient = ("them", "gradients are") if len(zero) > 1 else ("it", "gradient is")
        sentence = (
            f"no input reaches {quoted(zero)}: the {gradient} zero everywhere, so a port with "
            f"other numbers there may pass; to detect it, use inputs that are routed to {it}, "
            "or several keys if a softmax has only one"
        )
        notes.append(Finding("unreached-weights", sentence))
    if idle := [name for name, g in gradients.items() if g.any() and rms(g) <= budgets[name].zero]:
        sentence = (
            f"the gradient of {quoted(idle)} is zero up to rounding: no output depends on it, as "
            "for a bias of keys"
        )
        notes.append(StandingNote("zero-gradient", sentence))
    return tuple(notes)


def _zero_parts(name: str, gradient: np.ndarray) -> Iterator[str]:
    """Yield the parameter, or its slices, if their gradient is exactly zero."""
    if not gradient.size:
        return
    if not gradient.any():
        yield name
    elif gradient.ndim >= 3:
        yield from (f"{name}[{i}]" for i, part in enumerate(gradient) if not part.any())


_AS_JAX = (
    "a tensor that fails the budget of torch, which computes sums and softmaxes in float32, is "
    "judged by a budget of {}: in this dtype JAX adds up a bias's gradient, flax's layers store a "
    "product before they add its bias, and jax.nn.softmax stores its steps"
)


def _as_jax(_: None, prepared: ReferenceSide, side: PortSide) -> Findings:
    note = StandingNote("judged-as-jax", _AS_JAX.format(prepared.dtype))
    return Findings(notes=(note,) if prepared.as_jax else ())


def _frequencies(
    answer: tuple[tuple[StandingNote, ...], int], prepared: ReferenceSide, side: PortSide
) -> Findings:
    of_reference, length = answer
    arrays = side.alone.held(side.alone.facts.narrow_rows)
    return Findings(notes=(*of_reference, *rounded(arrays, "array", "port", length)))


def _scope(left_out: tuple[str, ...], prepared: ReferenceSide, side: PortSide) -> Findings:
    return Findings(notes=(scope(prepared.inputs, side.transforms, left_out),))


PROBES = (
    Probe(lambda doubts, *_: Findings(doubts=doubts), "input doubts"),
    Probe(lambda _, prepared, side: Findings(doubts=nothing_cut(side.port))),
    Probe(_weights),
    Probe(lambda found, *_: found, "canaries"),
    Probe(lambda notes, *_: Findings(notes=notes), "small features"),
    Probe(_unreached),
    Probe(_as_jax),
    Probe(lambda notes, *_: Findings(notes=notes), "read numbers"),
    Probe(_frequencies, "frequencies"),
    Probe(lambda _, prepared, side: Findings(notes=left_out_in_inference(prepared))),
    Probe(_scope, "integers left out"),
)
"""The probes of every port."""

OF_OTHER_INPUTS = (
    Probe(
        lambda others, prepared, side: ignored_integers(
            others, prepared, side.alone, side.transforms
        ),
        "other integers",
    ),
    Probe(
        lambda others, prepared, side: Findings(
            failures=kept_outputs(others, prepared, side.alone)
        ),
        "other inputs",
        when_eager=True,
    ),
)
"""The probes of a port that does not fail; they run it on other inputs."""

QUESTIONS_ASKED = (
    *("weights", "conventions"),
    *(probe.question for probe in (*PROBES, *OF_OTHER_INPUTS) if probe.question),
)
"""The questions that judging a port may ask."""


def scope(
    inputs: Inputs, transforms: tuple[str, ...], left_out: tuple[str, ...] = ()
) -> StandingNote:
    """Return a note on the inputs and transforms that were run, and on those that were not.

    left_out: names of inputs that the reference does not need.
    """
    given = inputs.by_name.items()
    shapes = [f"{f'input {name}' if inputs.args else name} {a.shape}" for name, a in given]
    without = [f"calls without {quoted(left_out)}"] if left_out else []
    others = ["other shapes", *without, *(name for name in TRANSFORMS if name not in transforms)]
    at = joined(shapes or ["no inputs"])
    return StandingNote(
        "scope", f"checked at {at} under {joined(transforms)}: {joined(others)} were not run"
    )
