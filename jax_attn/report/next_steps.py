"""Say what to do after a verdict: which command to run, or what to change before the next check."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.judge.result import Result


class NextStep(NamedTuple):
    """A step that brings a decision nearer.

    Attributes:
      change: "inputs", "reference", "pair", "weights" or "port"; "nothing" for a command that only
        finds out more.
      sentence: the step in words, with the command or the function that does it.
    """

    change: str
    sentence: str


_OTHER_NUMBERS = NextStep(
    "inputs",
    "check in a finer dtype, in which rounding hides less, or on other numbers, inputs as well as "
    "weights",
)
_TO_DECIDE = {
    "inputs": NextStep(
        "inputs",
        "change the inputs as the reasons say; parity.suggest_inputs(reference) makes inputs that "
        "reveal these bugs, if the weights are not so small that softmaxes are flat",
    ),
    "numbers": _OTHER_NUMBERS,
    "reference": NextStep(
        "reference", "change the reference as the reasons say, since no port can pass beside it"
    ),
    "pair": NextStep(
        "pair",
        "give the arguments that the reasons name in a parity.Pair, or check without --strict",
    ),
}
_OF_DOUBTS = {
    "drowned": "numbers",
    "near-decision": "numbers",
    "near-side": "numbers",
    "no-power": "numbers",
    "reference-errs": "reference",
    "inference-errs": "reference",
    "no-budget": "reference",
    "reads-numbers": "reference",
    "weights-not-compared": "pair",
    "gradients-not-paired": "pair",
    "gradients-off": "pair",
    "parameters-selected": "pair",
    "weights-skipped": "pair",
    "row-unused": "pair",
    "state-not-compared": "pair",
}
"""What decides a doubt of a kind; the inputs, if a kind is not listed."""


_BY_GOLDEN = {
    "inputs": NextStep(
        "inputs",
        "capture again with other inputs, as the reasons say; parity.suggest_inputs(reference) "
        "makes inputs that reveal these bugs",
    ),
    "numbers": _OTHER_NUMBERS._replace(
        sentence="capture again in a finer dtype, in which rounding hides less, or with other "
        "numbers, inputs as well as weights"
    ),
    "reference": NextStep(
        "reference", "capture again with a reference and arguments as the reasons say"
    ),
    "pair": NextStep(
        "pair",
        "give what the reasons name in parity.Pair(None, port, None, layout=…), or check without "
        "--strict",
    ),
}
"""`_TO_DECIDE` for a port that is judged by a golden reference, which fixes the inputs."""
_CAPTURED = ("gradients-off", "parameters-selected", "not-asked")
"""Doubts about what a golden reference was captured with."""


_WHERE_THE_REFERENCE_IS = (
    "find the first wrong place and its cause where the reference is: "
    "jax-attn check FILE.py:FUNCTION --explain"
)


def next_steps(result: Result, command: str) -> tuple[NextStep, ...]:
    """Return what to do next: nothing after PASS. command: the line that ran this check."""
    if result.verdict is Verdict.PASS:
        return ()
    if result.verdict is Verdict.INCONCLUSIVE:
        kinds = [doubt.kind for doubt in result.reasons]
        changes = {kind: _OF_DOUBTS.get(kind, "inputs") for kind in kinds}
        steps = _TO_DECIDE
        if _is_by_golden(result):
            changes |= {kind: "reference" for kind in kinds if kind in _CAPTURED}
            steps = _BY_GOLDEN
        return tuple(steps[each] for each in dict.fromkeys(changes.values()))
    return tuple(_after_failure(result, command))


def _is_by_golden(result: Result) -> bool:
    return any(note.kind == "golden-reference" for note in result.notes)


def _after_failure(result: Result, command: str) -> Iterator[NextStep]:
    if any(failure.kind == "weights-differ" for failure in result.failures):
        yield NextStep(
            "weights",
            "load the port's weights by transfer.load(port, reference.state_dict(), layout), or "
            "change the row of the table that the reason names",
        )
    elif _is_by_golden(result):
        yield NextStep("nothing", _WHERE_THE_REFERENCE_IS)
    elif result.explanation is None:
        explain = command if "--explain" in command.split() else f"{command} --explain"
        yield NextStep("nothing", f"find the first wrong place and its cause: {explain}")
    elif regions := result.explanation["regions"]:
        yield NextStep("port", _at_first_wrong(regions[0]))
    else:
        yield NextStep("port", result.explanation["sentence"])


def _at_first_wrong(region: dict[str, Any]) -> str:
    pair = region["first_wrong"]
    ours, theirs = (_place(pair[side]) for side in ("ours", "theirs"))
    causes = [cause["sentence"] for cause in region["causes"] if cause["confirmed"]]
    if causes:
        return f"change {ours} in the port: {causes[0]}"
    return f"make {ours} in the port compute what {theirs} computes in the reference"


def _place(tap: dict[str, Any]) -> str:
    """Return the operation with its line, or the module's name if the line is unknown."""
    where = tap["source"] or tap["module"]
    return f"{tap['op']} ({where})" if where else tap["op"]
