"""Findings of a result: sentences for people, each with a kind for programs."""

from collections.abc import Iterable
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple, Self

BLIND = "blind inputs: "
"""How a doubt begins that inputs would not reveal a bug; other inputs may reveal it."""

KINDS = MappingProxyType(
    {
        "over-budget": "an error is larger than rounding allows",
        "not-finite": "a number of the port is not finite where the oracle is, or the reverse",
        "other-shape": "a tensor of the port has another shape",
        "no-power": "the budget of a tensor is too large to show an error",
        "no-budget": "a perturbed run is not finite, so a tensor has no budget",
        "nothing-finite": "no element of the oracle is finite",
        "reference-errs": "the reference itself errs by more than rounding",
        "reference-not-finite": "the reference is not finite where the oracle is, or the reverse",
        "scope": "which inputs and transforms were run, and which were not",
        "golden-reference": "the reference was captured before, and is not at hand",
        "not-asked": "a golden reference of an older version lacks an answer of its reference",
        "gradients-off": "gradients were not compared, as requested",
        "parameters-selected": "only some parameters' gradients were compared, as requested",
        "all-zero": "every compared tensor is zero",
        "near-decision": "an integer decision lies within rounding of another",
        "near-side": "a number lies within rounding of a point where a gradient jumps",
        "judged-as-jax": "a failure was judged again by the budget of what JAX stores",
        "precision-pinned": "the products of an accelerator were run in full precision",
        "not-run": "a test made no check, or its check gave no result",
        "output-dtype": "an output has another dtype than the reference's",
        "coarse-port": "a port that fails computes in a coarser dtype than it is checked in",
        "weights-differ": "a weight is not the same on both sides, or has no counterpart",
        "weights-not-compared": "without a table, weights and their gradients are not compared",
        "gradients-not-paired": "the table pairs no gradients of parameters",
        "weights-skipped": "the table skips some parameters",
        "buffer-gradient": "the port holds as parameters what are buffers of the reference",
        "row-unused": "a row of the table matches nothing on either side",
        "unreached-weights": "no output depends on some weights on these inputs",
        "zero-gradient": "a gradient is zero up to rounding, whatever the inputs are",
        "padding-row": "torch computes no gradient for the padding row of an embedding",
        "neutral-weights": "weights or buffers hold only 0 or 1, as if they were left out",
        "neutral-input": "a floating-point input holds only 0 or 1, as if it were left out",
        "small-branch": "what is added is so small that leaving it out would not show",
        "neutral-formula": "parameters hold only 0 or 1, at which several formulas agree",
        "other-numbers": "the port gives different numbers in each call",
        "raised": "the port raises an error under only some transforms",
        "finite-under-some": "outputs are finite only under some transforms",
        "draws-random": "the port draws random numbers",
        "state-differs": "a call changes the state of only one side",
        "state-not-compared": "a call changes state that was not compared",
        "second-call-differs": "a second call gives other outputs than the reference's second call",
        "second-call-not-compared": "the port cannot be called a second time",
        "outputs-kept": "the port returns its first outputs again on other inputs",
        "input-ignored": "the port is wrong for other values of an integer input",
        "input-not-varied": "no other values of an integer input could be tried",
        "inference-errs": "the reference errs in inference mode",
        "padding-left-out": "torch leaves padded tokens 0 in inference mode, and not under grad",
        "other-nan": "the reference is NaN at elements that are not declared",
        "declared-nan": "the reference is NaN at some elements, as declared",
        "reads-numbers": "the reference decides in Python by a number that it computes",
        "nothing-cut": "every device of the mesh computes everything",
        "equal-shares": "every device counts as many tokens, so a mean of means would not show",
        "unlike-copies": "devices disagree on an array that should be replicated",
        "traffic": "how much a program sends between devices, and how much each holds",
        "gradient-replicated": "a gradient is sharded less than its parameter or input",
        "mesh-costs": "a program sends or holds more than it should",
        "moved": "a parameter has another sharding after a step",
        "input-not-finite": "an input or a weight holds NaN or infinity",
        "inverted-mask": "an inverted mask would not show",
        "ignored-mask": "an ignored mask would not show",
        "mask-not-tried": "the reference refuses the mask with which a canary calls it",
        "no-empty-query": "no query is without visible keys",
        "mask-edge": "a mask that is off by one key would not show",
        "mask-one-end": "a mask, or padding, hides tokens only at one end of each row",
        "mask-causal": "a mask is causal, and a port may be causal without it",
        "window": "an ignored window would not show",
        "alike-along-axis": "an input is constant along an axis",
        "bias-as-mask": "a bias holds only the values of a mask",
        "positions": "mixing other positions would not show",
        "one-row": "every input has one row, or one position",
        "swapped-inputs": "two inputs are the same array",
        "no-padding": "no id is the padding id, which the reference treats specially",
        "no-softmax": "the reference calls no softmax, so bugs of attention were not tried",
        "other-keys": "weights that go to other keys would not show",
        "softmax-over-queries": "a softmax over the queries would not show",
        "mixed-heads": "exchanging queries and heads would not show",
        "scale": "a wrong scale of the scores would not show",
        "stopped-gradient": "a gradient stopped at the scores would not show",
        "bug-not-tried": "the reference raises an error when a bug is planted in it",
        "softmax-unused": "no output depends on the weights of a softmax",
        "few-tried": "a bug was tried in only some of many places",
        "narrow-frequencies": "frequencies of positions are held in a narrow dtype",
        "softcap": "a wrong softcap would not show",
        "tanh": "a missing tanh would not show",
        "epsilon": "a wrong epsilon of a norm would not show",
        "epsilon-alone": "a wrong epsilon in only one norm would not show",
        "epsilon-of-denominator": "a missing epsilon of a denominator would not show",
        "idle-branch": "a branch of the reference never takes effect",
        "kink": "gradients differ only by a convention: at a kink, or a tie of a maximum",
        "empty-rows": "the port differs only in what it gives queries that see no key",
        "idle-guard": "a guard against zero never takes effect",
        "small-features": "some features are too small compared with others to be judged",
        "drowned": "rounding hides any bugs that the inputs might reveal",
        "no-update": "no parameter moves",
        "buffer-trained": "the port's optimizer moves what is a buffer of the reference",
        "optimizer-state-differs": "the two optimizers do not go on from one state",
        "moment-missing": "the port's optimizer lacks a state that torch's has",
        "moment-not-compared": "a state of torch's optimizer has no known counterpart",
        "option-left-out": "ignoring an option of the optimizer would not show",
        "drift": "a parameter moves only by rounding",
        "optimizer-rounding": "the port's optimizer differs from torch's only by its own rounding",
        "recipe-rate": "wrong updates are those of another learning rate",
        "recipe-option": "wrong updates are those of another option, or of a missing one",
        "recipe-schedule": "wrong updates are those of another schedule",
        "recipe-accumulation": "wrong updates are those of gradients accumulated another way",
        "not-rebuilt": "some of a checkpoint was not verified",
        "beyond-rebuild": "the model does more than the rebuild of its attention",
        "about-checkpoint": "which part of a checkpoint the verdict covers",
        "training-left-out": "a translation lacks what its reference does in training mode only",
        "bug-not-seen": "a row does not detect a bug that it claims to detect",
    }
)
"""Kind of finding -> its meaning. The kind says what was found; the weight says how bad it is."""


class Finding(str):
    """A sentence of a result, and its kind, a word of `KINDS`.

    Raises:
      ValueError: the kind is not in `KINDS`.
    """

    kind: str

    def __new__(cls, kind: str, sentence: str) -> Self:
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        finding = super().__new__(cls, sentence)
        finding.kind = kind
        return finding

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        """Return the arguments of `__new__`, so that copies and pickles keep the kind."""
        return self.kind, str(self)

    def after(self, prefix: str) -> Self:
        """Return the same finding, its sentence after a prefix."""
        return type(self)(self.kind, f"{prefix}{self}")


class StandingNote(Finding):
    """A note that `strict` does not count, because no ordinary input could remove it."""


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
