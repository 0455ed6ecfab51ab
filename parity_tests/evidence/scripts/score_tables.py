"""The page of scored verifiers: how many labelled ports each passes, and the plot of it."""

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from measuring import PROFILE, ROOT, table, where

from jax_attn.bench.results import plot

sys.path.append(str(ROOT / "parity_tests"))  # where this runs as a script

from scores.qualities import QUALITIES
from scores.records import environment, kept
from scores.verifiers import ENDS, LEAST, OURS, VERIFIERS

PLOT = PROFILE / "scores.svg"
SHOWN = ("allclose 1e-5", "allclose 1e-3", "absolute 1e-3", "cosine .999", OURS)
"""The checks whose figures stand by kind and by size of mistake."""
SIZES = {"below 1e-4": 1e-4, "1e-4 to 1e-2": 1e-2, "above 1e-2": np.inf}
"""The largest relative difference in float64."""
DRAWS = 1000
Record = dict[str, Any]


def labelled() -> tuple[list[Record], list[Record]]:
    """Return the wrong ports and the right ones that were scored."""
    scored = [record for record in kept().values() if "verdicts" in record]
    return [r for r in scored if "line" in r], [r for r in scored if "line" not in r]


def largest(port: Record, *parts: str) -> float:
    """The largest difference in these parts: outputs, gradients."""
    return max(found[part] for found in port["differences"].values() for part in parts)


def wrong_in(gradients: bool) -> list[Record]:
    """The wrong ports, with `gradients`, or else those whose outputs are wrong."""
    wrong, _ = labelled()
    return wrong if gradients else [port for port in wrong if largest(port, "outputs") > LEAST]


def said(ports: Sequence[Record], quality: str, verifier: str, verdict: str) -> list[bool]:
    """Whether a verifier says so of each port that it is asked about."""
    found = [port["verdicts"][quality] for port in ports]
    return [verdicts[verifier] == verdict for verdicts in found if verifier in verdicts]


def _counted(
    ports: Sequence[Record], quality: str, verifier: str, verdict: str
) -> tuple[np.ndarray, np.ndarray]:
    """How many ports there are of each reference and kind, and of how many a verifier says so."""
    asked = [port for port in ports if verifier in port["verdicts"][quality]]
    subjects, kinds = (sorted({port[key] for port in asked}) for key in ("subject", "kind"))
    every, found = np.zeros((2, len(subjects), len(kinds)))
    for port in asked:
        at = subjects.index(port["subject"]), kinds.index(port["kind"])
        every[at] += 1
        found[at] += port["verdicts"][quality][verifier] == verdict
    return every, found


def _mean(every: np.ndarray, found: np.ndarray) -> np.ndarray:
    """The mean over the kinds, the last axis, of the shares in per cent; kinds may be absent."""
    shares = np.divide(found, every, out=np.full_like(found, np.nan), where=every > 0)
    return 100 * np.nanmean(shares, axis=-1)


def share(ports: Sequence[Record], quality: str, verifier: str, verdict: str = "P") -> float:
    """The mean over the kinds of mistake of the share of ports of which it says so, in per cent."""
    every, found = _counted(ports, quality, verifier, verdict)
    return float(_mean(every.sum(0), found.sum(0))) if every.size else 0.0


def interval(ports: Sequence[Record], quality: str, verifier: str) -> str:
    """The share, and the 95% interval of a bootstrap over the references."""
    every, found = _counted(ports, quality, verifier, "P")
    if not every.size:
        return "–"
    n = len(every)
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=DRAWS)
    low, high = np.percentile(_mean(drawn @ every, drawn @ found), (2.5, 97.5))
    return f"{share(ports, quality, verifier):.0f} ({low:.0f}–{high:.0f})"


def rows_of(gradients: bool) -> list[tuple[str, str]]:
    """The name of each verifier, and its name in the records, with or without gradients."""
    end = ENDS[gradients]
    named = [(name, of_gradients) for name, (_, of_gradients, _) in VERIFIERS.items()]
    return [(n, n + end) for n, of in [*named, (OURS, True)] if of or not gradients]


def counts() -> str:
    """How many pairs there are, and what became of the candidates."""
    wrong, right = labelled()
    every = kept().values()
    raised = sum("raises" in record for record in every)
    same = len(every) - raised - len(wrong) - len(right)
    subjects = len({record["subject"] for record in every})
    kinds = len({record["kind"] for record in wrong})
    return (
        f"{len(wrong)} wrong ports of {kinds} kinds, {len(wrong_in(False))} of them with wrong "
        f"outputs and the others with wrong gradients alone, and {len(right)} right ones, of "
        f"{subjects} references. Of the candidates of wrong ports, {raised} raise an error, which "
        f"every check would see, and {same} differ by less than the label asks: they are not "
        "scored."
    )


def scores(gradients: bool) -> str:
    """By verifier: the wrong ports that pass, and the right ones that do not."""
    wrong, (_, right) = wrong_in(gradients), labelled()
    rows = []
    for name, recorded in rows_of(gradients):
        passed = [interval(wrong, quality, recorded) for quality in QUALITIES]
        failed = [not_passed(right, quality, recorded) for quality in QUALITIES]
        rows.append((f"**{name}**" if name == OURS else name, *passed, *failed))
    head = [f"wrong that pass, {quality}" for quality in QUALITIES]
    head += [f"right that do not, {quality}" for quality in QUALITIES]
    return table(("check", *head), rows)


def not_passed(right: Sequence[Record], quality: str, verifier: str) -> str:
    """How many right ports fail, and how many are undecided."""
    failed, unsure = (said(right, quality, verifier, verdict) for verdict in "FI")
    if not failed:
        return "–"
    undecided = f" + {sum(unsure)} undecided" if sum(unsure) else ""
    return f"{sum(failed)}{undecided} of {len(failed)}"


def by_kind() -> str:
    """By kind of mistake: the wrong ports that pass on suggested inputs, with gradients."""
    wrong, _ = labelled()
    kinds = {kind: [p for p in wrong if p["kind"] == kind] for kind in {p["kind"] for p in wrong}}
    return _passed(dict(sorted(kinds.items())), "mistake")


def by_size() -> str:
    """The same by the largest difference in float64."""
    wrong, _ = labelled()
    sizes: dict[str, list[Record]] = {size: [] for size in SIZES}
    for port in wrong:
        off = largest(port, "outputs", "gradients")
        sizes[next(size for size, most in SIZES.items() if off <= most)].append(port)
    return _passed(sizes, "largest difference")


def _passed(groups: dict[str, list[Record]], title: str) -> str:
    names = [name + ENDS[True] for name in SHOWN]
    rows = [
        (group, len(ports), *(sum(said(ports, "suggested", name, "P")) for name in names))
        for group, ports in groups.items()
    ]
    return table((title, "ports", *SHOWN), rows)


def seconds() -> str:
    """The machine, and the median seconds of a check of ours and of what it needs first."""
    wrong, right = labelled()
    found = [port["verdicts"]["suggested"] for port in (*wrong, *right)]
    parts = {part: [f[f"{part}, gradients"] for f in found] for part in ("prepared", "seconds")}
    once, each = (f"{median(part or [0.0]):.1f} s" for part in parts.values())
    return (
        f"On {where(environment())}, two processes at a time. The median of `parity.check` with "
        f"gradients on suggested inputs is {once} to prepare the reference, once for all its "
        f"ports, and {each} for each port, compilation included. The other checks take "
        "milliseconds, once both sides have run."
    )


def figure() -> Any:
    """Draw the share of wrong ports that each verifier passes, by quality of inputs."""
    import matplotlib
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8.4, 6.4), layout="constrained")
    colours = dict(zip(QUALITIES, (plot.GREY, plot.SKY_BLUE, plot.BLUE), strict=True))
    with matplotlib.rc_context(plot.STYLE):
        panels = drawn.subplots(1, 2)
        for axes, (gradients, title) in zip(
            panels, ((False, "outputs"), (True, "outputs and gradients")), strict=True
        ):
            wrong, names = wrong_in(gradients), rows_of(gradients)
            for place, (quality, colour) in enumerate(colours.items()):
                at = [row + 0.27 * (place - 1) for row in range(len(names))]
                passed = [share(wrong, quality, recorded) for _, recorded in names]
                unsure = [share(wrong, quality, recorded, "I") for _, recorded in names]
                label = f"inputs: {quality}" if not gradients else None
                axes.barh(at, passed, 0.25, color=colour, label=label)
                axes.barh(at, unsure, 0.25, left=passed, fill=False, edgecolor=colour, hatch="////")
            axes.set(xlim=(0, 100), xlabel="wrong ports that pass, %; hatched: undecided")
            axes.set_title(title, loc="left")
            axes.set_yticks(range(len(names)), [name for name, _ in names])
            axes.invert_yaxis()
            axes.get_yticklabels()[-1].set_fontweight("bold")
        drawn.legend(loc="outside upper left", ncols=3, frameon=False)
    return drawn


def thresholds() -> str:
    """What the threshold of each verifier is."""
    return table(("check", "threshold"), [(n, source) for n, (*_, source) in VERIFIERS.items()])


def tables() -> dict[str, str]:
    """Return the parts of the page, by the name of their places."""
    return {
        "score_counts": counts(),
        "score_outputs": scores(False),
        "score_gradients": scores(True),
        "score_kinds": by_kind(),
        "score_sizes": by_size(),
        "score_thresholds": thresholds(),
        "score_seconds": seconds(),
    }
