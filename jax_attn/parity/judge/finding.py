"""What a result says: sentences for people, each of a kind for programs."""

from collections.abc import Iterable
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple, Self

KINDS = MappingProxyType(
    {
        "over-budget": "an error is larger than rounding allows",
        "not-finite": "a number of the port is not finite where the oracle is, or the reverse",
        "other-shape": "a tensor of the port has another shape",
        "no-power": "the budget of a tensor is too large to show an error",
        "no-budget": "a perturbed run is not finite, so that a tensor has no budget",
        "nothing-finite": "the oracle is nowhere finite",
        "reference-errs": "the reference itself errs by more than rounding",
        "reference-not-finite": "the reference is not finite where the oracle is, or the reverse",
        "scope": "the inputs and transforms that were run, and what was not",
        "gradients-off": "gradients were not compared, as was asked",
        "parameters-selected": "only some parameters' gradients were compared, as was asked",
        "all-zero": "every compared tensor is zero",
        "near-decision": "an integer decision lies within rounding of another",
        "near-side": "a number lies within rounding of where a gradient jumps",
        "judged-as-jax": "what fails is judged by the budget of what JAX stores",
        "precision-pinned": "the products of an accelerator were run in full precision",
        "not-run": "a test made no check, or its check gave no result",
        "weights-differ": "a weight is not the same on both sides, or has no counterpart",
        "weights-not-compared": "there is no table, so weights and their gradients stay uncompared",
        "gradients-not-paired": "the table pairs no gradients of parameters",
        "weights-skipped": "the table passes over some parameters",
        "row-unused": "a row of the table matches nothing on either side",
        "unreached-weights": "no output depends on some weights on these inputs",
        "zero-gradient": "a gradient is zero but for rounding, whatever the inputs are",
        "padding-row": "torch gives an embedding's row of padding no gradient",
        "neutral-weights": "weights or buffers hold 0 or 1 only, as if they were left out",
        "neutral-formula": "parameters hold 0 or 1 only, at which several formulas agree",
        "other-numbers": "the port gives other numbers each time",
        "finite-under-some": "outputs are finite under some transforms only",
        "draws-random": "the port draws random numbers",
        "state-differs": "a call changes the state of one side only",
        "state-not-compared": "a call changes state that was not compared",
        "second-call-differs": "a second call gives other outputs than the reference's does",
        "second-call-not-compared": "the port cannot be called a second time",
        "outputs-kept": "the port gives its first outputs again on other inputs",
        "input-ignored": "the port is wrong where an integer input has other values",
        "input-not-varied": "no other values of an integer input could be tried",
        "inference-errs": "the reference errs in inference mode",
        "other-nan": "the reference is NaN elsewhere than is declared",
        "declared-nan": "the reference is NaN in places, as declared",
        "reads-numbers": "the reference decides in Python by a number that it computes",
        "nothing-cut": "every device of the mesh computes the whole",
        "unlike-copies": "devices disagree on what should be one array",
        "traffic": "what a program sends between devices, and what each holds",
        "gradient-replicated": "a gradient is cut less than what it is the gradient of",
        "mesh-costs": "a program sends or holds more than it should",
        "moved": "a parameter lies elsewhere after a step",
        "input-not-finite": "an input or a weight holds NaN or infinity",
        "inverted-mask": "an inverted mask would not show",
        "ignored-mask": "an ignored mask would not show",
        "mask-not-tried": "the reference refuses the mask that a canary takes",
        "no-empty-query": "no query is left without keys",
        "mask-edge": "a mask that is off by one key would not show",
        "mask-one-end": "a mask hides tokens at one end of each row only",
        "mask-causal": "a mask is causal, as a port may be without it",
        "window": "an ignored window would not show",
        "alike-along-axis": "an input is the same along an axis",
        "bias-as-mask": "a bias holds only what a mask does",
        "positions": "which positions are mixed would not show",
        "one-row": "every input has one row, or one position",
        "swapped-inputs": "two inputs are the same array",
        "no-padding": "no id is the padding that the reference treats apart",
        "no-softmax": "the reference calls no softmax, so bugs of attention were not tried",
        "other-keys": "weights that go to other keys would not show",
        "softmax-over-queries": "a softmax over the queries would not show",
        "mixed-heads": "queries and heads mixed up would not show",
        "scale": "a wrong scale of the scores would not show",
        "stopped-gradient": "a gradient stopped at the scores would not show",
        "softmax-not-tried": "the reference refuses a bug in its softmaxes",
        "softmax-unused": "no output depends on the weights of a softmax",
        "few-tried": "a bug was tried in some of many places",
        "softcap": "a wrong softcap would not show",
        "tanh": "a missing tanh would not show",
        "epsilon": "a wrong epsilon of a norm would not show",
        "epsilon-alone": "a wrong epsilon of one norm alone would not show",
        "epsilon-of-denominator": "a missing epsilon of a denominator would not show",
        "idle-branch": "a branch of the reference never takes effect",
        "idle-guard": "a guard against zero never takes effect",
        "small-features": "some features are too small beside others to be judged",
        "drowned": "rounding hides whatever bugs the inputs might reveal",
        "no-update": "no parameter moves",
        "moment-missing": "the port's optimizer lacks a state that torch's has",
        "moment-not-compared": "a state of torch's optimizer has no known counterpart",
        "option-left-out": "an optimizer's option that is left out would not show",
        "drift": "rounding alone moves a parameter",
        "own-optimizer": "the port's optimizer was given",
        "recipe-rate": "wrong updates are those of another learning rate",
        "recipe-option": "wrong updates are those of another option, or of one left out",
        "recipe-schedule": "wrong updates are those of another schedule",
        "recipe-accumulation": "wrong updates are those of gradients accumulated otherwise",
        "not-rebuilt": "some of a checkpoint was not verified",
        "beyond-rebuild": "the model does more than the rebuild of its attention",
        "about-checkpoint": "what of a checkpoint the verdict is about",
        "bug-not-seen": "a row does not see a bug that it claims to",
    }
)
"""The kinds of findings, each with its meaning. A kind says what; the weight says how bad."""


class Finding(str):
    """A sentence of a result, and its kind, a word of `KINDS`.

    Raises:
      ValueError: another kind.
    """

    kind: str

    def __new__(cls, kind: str, sentence: str) -> Self:
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        finding = super().__new__(cls, sentence)
        finding.kind = kind
        return finding

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        """What `__new__` takes: a finding is copied and pickled with its kind."""
        return self.kind, str(self)

    def after(self, prefix: str) -> Self:
        """Return the same finding, its sentence after a prefix."""
        return type(self)(self.kind, f"{prefix}{self}")


class StandingNote(Finding):
    """A note that `strict` leaves a note: no input, or no ordinary one, could remove it."""


class Findings(NamedTuple):
    """Findings by their weight: reasons for FAIL, reasons for INCONCLUSIVE, and notes."""

    failures: tuple[Finding, ...] = ()
    doubts: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()

    @classmethod
    def merged(cls, parts: Iterable["Findings"]) -> "Findings":
        """Join the findings of each weight, in order."""
        return cls(*(tuple(chain.from_iterable(each)) for each in zip(cls(), *parts, strict=True)))


def findings(kind: str, sentences: Iterable[str]) -> tuple[Finding, ...]:
    """Make findings of one kind."""
    return tuple(Finding(kind, sentence) for sentence in sentences)
