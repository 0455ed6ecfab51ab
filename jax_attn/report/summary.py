"""A run of checks in figures and in words: counts of verdicts, levels, float32 accuracy."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.judge.not_run import NotRun
from jax_attn.parity.judge.result import Result

_LEVEL_IN_WORDS = {
    "compiled": "accepted by the compiler",
    "lowered": "lowered, as there is no compiler here",
    "failed": "NOT accepted by the compiler, for the reasons given",
    "not compiled": "not compiled, as there is no compiler here",
    "refused": "refused by the kernel, for the reasons given",
}


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Counts of verdicts, and the float32 accuracy."""
    count = Counter(result.verdict for result in results)
    return {
        **{verdict.value.lower(): count[verdict] for verdict in Verdict},
        "float32_error_over_torch": accuracy(results),
    }


def accuracy(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Our RMS error over torch's own, both against the oracle: median and worst.

    Over every tensor of every measured float32 case, all together and by shape; a tensor on
    which torch makes no error has no ratio.
    """
    ratios: dict[str, list[float]] = {"overall": []}
    for result in results:
        if (result.dtype, result.level) != ("float32", "measured"):
            continue
        of_tensors = [t.ratio for t in result.tensors if t.ratio is not None]
        ratios["overall"] += of_tensors
        ratios.setdefault(result.details.get("shape", "given"), []).extend(of_tensors)
    return {
        shape: {"median": statistics.median(values), "worst": max(values), "tensors": len(values)}
        for shape, values in ratios.items()
        if values
    }


def summary_lines(results: Sequence[Result], not_run: Sequence[NotRun] = ()) -> list[str]:
    """The summary in words."""
    count = Counter(result.verdict for result in results)
    verdicts = ", ".join(f"{count[verdict]} {verdict.value.lower()}" for verdict in Verdict)
    levels = Counter(f"{result.level} on {result.backend}" for result in results)
    lines = [f"{verdicts} ({', '.join(f'{n} {level}' for level, n in levels.items())})"]
    listed = Counter(item.level for item in not_run)
    lines += [
        f"{listed[level]} {words}, not run, listed apart"
        for level, words in _LEVEL_IN_WORDS.items()
        if listed[level]
    ]
    lines += [
        f"float32 error over torch's own, {shape}: median {ratio['median']:.2f}, "
        f"worst {ratio['worst']:.2f} ({ratio['tensors']} tensors)"
        for shape, ratio in accuracy(results).items()
    ]
    for sizes in ("tiles", "pages"):
        whose = Counter(r.details.get(sizes, "").partition(":")[0] for r in results)
        counts = [f"{n} {word}" for word, n in whose.most_common() if word]
        lines += [f"{sizes}: {', '.join(counts)}"] if counts else []
    shared = set.intersection(*(set(r.notes) for r in results)) if results else set()
    return lines + [f"note: {note}" for note in sorted(shared)]
