"""One labelled pair: what each verifier says of it, on inputs of each quality."""

import time
from functools import cache
from typing import Any

from jax_attn import parity
from jax_attn.parity.run.inputs_and_runs import Run
from jax_attn.translate.outputs import called
from scores.pairs import Pair, compared, differences, exact, of_port, own, tensors
from scores.qualities import QUALITIES
from scores.subjects import LOGITS, Subject
from scores.verifiers import ENDS, LEAST, OF_LOGITS, OURS, VERIFIERS


def scored(pair: Pair) -> dict[str, Any]:
    """Return the record of a pair: its label, and by quality and verifier P, F or I (undecided).

    differences: what float64 sees of the port. A wrong port that raises an error, or of which
    float64 sees nothing that float32 would hold, has no label and is not scored.

    Raises ValueError if float64 sees a mistake in a port that ought to be right.
    """
    of = pair.subject
    record: dict[str, Any] = {"subject": of.name, "kind": pair.kind or pair.style}
    if pair.change is not None:
        record["line"] = pair.change.line
    record["digest"] = pair.digest
    for quality in QUALITIES:  # an error of these is no error of the port
        exact(of, quality), own(of, quality)
    try:
        record["differences"] = found = differences(pair)
        runs = {quality: of_port(pair, quality) for quality in QUALITIES}
    except Exception as error:  # whatever a port raises, whoever calls it will see it
        if pair.change is None:
            raise
        return record | {"raises": type(error).__name__}
    most = max(max(parts.values()) for parts in found.values())
    if pair.change is None and most > LEAST / 2:
        raise ValueError(f"{pair.name}: expected a right port, got a difference of {most}")
    if pair.change is None or most > LEAST:
        record["verdicts"] = {q: _on(pair, q, run) for q, run in runs.items()}
    return record


def _on(pair: Pair, quality: str, run: Run) -> dict[str, str | float]:
    """The verdicts on inputs of one quality, and the seconds of our own."""
    of = pair.subject
    found: dict[str, str | float] = {}
    for gradients, end in ENDS.items():
        names = compared(of, quality, gradients, run)
        every = (tensors(r, gradients) for r in (run, own(of, quality), exact(of, quality)))
        got, want, finer = ({name: each[name] for name in names} for each in every)
        for name, (verifier, of_gradients, _) in VERIFIERS.items():
            is_asked = name not in OF_LOGITS or of.name in LOGITS
            if is_asked and (of_gradients or not gradients):
                found[name + end] = "PF"[not verifier(got, want, finer)]
        golden, prepared_in = _prepared(of, quality, gradients)
        begun = time.perf_counter()
        found[OURS + end] = _ours(pair, golden)
        found[f"seconds{end}"] = round(time.perf_counter() - begun, 2)
        found[f"prepared{end}"] = prepared_in
    return found


@cache
def _prepared(of: Subject, quality: str, gradients: bool) -> tuple[parity.Golden, float]:
    """The reference's side of our check, with which it gives the verdict of a check without it.

    The second is the seconds that it took.
    """
    inputs, begun = dict(of.inputs(quality)), time.perf_counter()
    golden = parity.prepare(of.reference, inputs, reference_call=called, gradients=gradients)
    return golden, round(time.perf_counter() - begun, 2)


def _ours(pair: Pair, golden: parity.Golden) -> str:
    layout = pair.subject.translation.layout
    result = parity.check(golden, pair.made, layout=layout, port_call=called, transforms=("jit",))
    return str(result.verdict)[0]
