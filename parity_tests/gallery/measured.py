"""Check one port in every way that its subject allows, and cut the results down to a record."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from gallery_tables import Record

from gallery.port import Port, Subject
from jax_attn.environment import version
from jax_attn.parity import Pair, Result, TrainingPair, Verdict, check, check_training
from jax_attn.parity.judge.compare import TensorReport, deciding

LONGEST = 400
"""Characters of a sentence that a record keeps."""
PARTS: dict[str, Callable[[str], bool]] = {
    "outputs": lambda kind: kind == "output",
    "gradients": lambda kind: kind.startswith("gradient"),
    "state": lambda kind: kind != "output" and not kind.startswith("gradient"),
}
"""What a check compares; of a training, the updates, the losses and the moments are outputs."""
VERSIONS = ("jax", "torch", "transformers", "keras")


def measured(port: Port) -> Record:
    """Return the record of a port: its checks, and what `explain` says of the first failure.

    Gradients are compared in the first dtype, on the pair's own inputs. A port that fails there is
    not checked on further inputs, where the same error would hide another. One that cannot be built
    has the reason in place of checks, and a check that raises an error has that of the error.
    """
    begun = time.perf_counter()
    versions = {name: found for name in VERSIONS if (found := version(name))}
    record: Record = {"package": port.package, "version": port.installed, "with": versions}
    checks: dict[str, Record] = {}
    first, *others = port.dtypes
    try:
        subject = port.make(first)
    except Exception as error:
        record["not built"] = _said(error)
    else:
        checks[first] = _check_of(record, first, lambda: subject.pair)
        if checks[first]["verdict"] in ("PASS", "INCONCLUSIVE"):
            for name, inputs in subject.further.items():
                pair = replace(subject.pair, inputs=inputs, gradients=False)
                checks[name] = _check_of(record, name, lambda pair=pair: pair)
        for dtype in others:
            checks[dtype] = _check_of(record, dtype, lambda x=dtype: _outputs(port.make(x)))
    return record | {"checks": checks, "seconds": round(time.perf_counter() - begun, 1)}


def _check_of(record: Record, name: str, make: Callable[[], Pair | TrainingPair]) -> Record:
    """Return a check of a port; if it raises an error, its reason. Explain the first that fails."""
    try:
        checked, result = _checked(make())
    except Exception as error:
        return {"verdict": "ERROR", "reason": _said(error)}
    _explain(record, name, result)
    return checked


def _outputs(subject: Subject) -> Pair | TrainingPair:
    pair = subject.pair
    return replace(pair, gradients=False) if isinstance(pair, Pair) else pair


def _checked(pair: Pair | TrainingPair) -> tuple[Record, Result]:
    if isinstance(pair, TrainingPair):
        result = check_training(pair.reference, pair.port, pair.batches, **pair.options)
    else:
        options = {**pair.options, "transforms": ("jit",)}
        result = check(pair.reference, pair.port, pair.inputs, **options)
    record: Record = {"verdict": str(result.verdict)}
    for name, is_one in PARTS.items():
        if tensors := [t for t in result.tensors if is_one(t.kind)]:
            record[name] = _worst(tensors)
    if result.verdict is not Verdict.PASS and result.reasons:
        record["reason"] = _cut(str(result.reasons[0]))
    kinds = sorted({finding.kind for finding in result.findings})
    return record | {"kinds": kinds}, result


def _worst(tensors: Iterable[TensorReport]) -> Record:
    """Return the verdict over tensors, how many there are, and the one that decides it."""
    tensors = tuple(tensors)
    verdict, worst = Verdict.worst(t.verdict for t in tensors), deciding(tensors)
    record: Record = {"verdict": str(verdict), "tensors": len(tensors)}
    if worst is None or math.isnan(worst.fraction):
        return record
    relative = worst.error / worst.scale if worst.scale else math.nan
    record |= {"worst": worst.name, "budgets": float(f"{worst.fraction:.3g}")}
    return record | ({"relative": float(f"{relative:.2g}")} if math.isfinite(relative) else {})


def _explain(record: Record, name: str, result: Result) -> None:
    """Add what `explain` says of the first check that fails."""
    if result.verdict is not Verdict.FAIL or "explained" in record:
        return
    try:
        said = result.explain().sentence
    except Exception as error:
        said = f"explain raised {_said(error)}"
    record |= {"explained": _cut(said), "explained of": name}


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return _cut(f"{type(error).__name__}: {' '.join(lines)}")


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
