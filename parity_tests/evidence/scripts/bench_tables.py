"""What the docs say of the bench: its targets, where the time goes, and the plot."""

import json
from pathlib import Path

import targets
from measuring import DATA, PROFILE

from jax_attn.bench.record import Record
from jax_attn.bench.results import plot, words

BENCH = DATA / "bench"
CACHED = BENCH / "cached"
PARTS = PROFILE / "blocked.json"
STEPS = PROFILE / "steps.json"
PLOT = BENCH / "time.svg"
MOST_TEMPORARIES = 128 * words.MIB
PLOTTED = "time-attention-1x8x64-float32-forward"
ROOT = Path(__file__).parents[3]


def bench(benchmarks: dict[str, Record]) -> str:
    """The targets, and the plot."""
    if not benchmarks:
        return "Not yet measured."
    plotted = f"![time of one call against length](../../{PLOT.relative_to(ROOT)})"
    return f"{targets.table(benchmarks)}\n\n{parts(json.loads(PARTS.read_text()))}\n\n{plotted}"


def decode(cached: dict[str, Record]) -> str:
    """The targets of a decode step, and what it is spent on."""
    if not cached:
        return "Not yet measured."
    return f"{targets.table(cached, targets.DECODING)}\n\n{steps(json.loads(STEPS.read_text()))}"


def steps(profile: dict) -> str:
    """A step by a call, in a scan, and its two products alone."""
    rows = ["| one step, ms | by a call | in a `lax.scan` | its two products |", "|---" * 4 + "|"]
    for name, ms in profile["milliseconds"].items():
        rows.append(f"| {name} | {' | '.join(f'{taken:.2f}' for taken in ms.values())} |")
    return "\n".join(["By `parity_tests/evidence/scripts/steps.py`, medians:", "", *rows])


def parts(profile: dict) -> str:
    """What the kernel's time is spent on, from the same tiles with less and less in them."""
    ms = profile["milliseconds"]
    products, whole = ms["products"], ms["whole"]
    exponentials = ms["products and exponentials"] - products
    spent = {
        "the two products": products,
        "the exponentials": exponentials,
        "the running maximum, the sums and the rescaling": whole - products - exponentials,
    }
    shares = ", ".join(f"{share / whole:.0%} {what}" for what, share in spent.items())
    temporaries = ", ".join(
        f"{words.size(n)} {mode} ({'met' if n <= MOST_TEMPORARIES else 'missed'})"
        for mode, n in profile["temporaries"].items()
    )
    return (
        f"By `parity_tests/evidence/scripts/parts.py`: a forward pass at L = 2048 takes "
        f"{whole:.0f} ms: {shares}. The temporaries beyond inputs and outputs at L = 32,768 and 8 "
        f"heads, by the compiler (target: ≤ {words.size(MOST_TEMPORARIES)}), are {temporaries}."
    )


def kept(folder: Path = BENCH) -> dict[str, Record]:
    """Every run of the bench that was kept there, by name."""
    return {path.stem: Record.read(path) for path in sorted(folder.glob("*.json"))}


def plotted(benchmarks: dict[str, Record]):
    """The figure of time against length, of all the runs; ValueError where none has it."""
    lengths = [targets.attention(T) for T in targets.LENGTHS]
    with_lengths = {
        name: record
        for name, record in benchmarks.items()
        if any(fits(row.workload) for row in record.rows for fits in lengths)
    }
    figures = plot.figures(targets.merged(with_lengths)) if with_lengths else {}
    if PLOTTED not in figures:
        names = ", ".join(benchmarks)
        raise ValueError(f"runs of the bench: expected one with {PLOTTED}, got {names}")
    return figures[PLOTTED]
