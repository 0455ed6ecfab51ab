"""What the docs say of the bench: its targets, where the time goes, and the plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import measuring
import targets
from measuring import DATA, SCRIPTS, beside, table

from jax_attn.bench.implementations import OURS
from jax_attn.bench.record import Ratio, Record
from jax_attn.bench.results import plot, words

BENCH = DATA / "bench"
CACHED = BENCH / "cached"
HALF = BENCH / "half"
OTHER, AVX2 = BENCH / "other", BENCH / "avx2"
PLOT = BENCH / "time.svg"
MOST_TEMPORARIES = 128 * words.MIB
PLOTTED = "time-attention-1x8x64-float32-forward"


def bench(benchmarks: dict[str, Record]) -> str:
    """The targets, and the plot."""
    if not benchmarks:
        return "Not yet measured."
    profiles = parts(measuring.kept("blocked")), tiles(measuring.kept("tiles"))
    plotted = f"![time of one call against length]({beside(PLOT)})"
    return "\n\n".join([targets.table(benchmarks), *profiles, plotted])


def decode(cached: dict[str, Record]) -> str:
    """The targets of a decode step, and what it is spent on."""
    if not cached:
        return "Not yet measured."
    return f"{targets.table(cached, targets.DECODING)}\n\n{steps(measuring.kept('steps'))}"


def other(folder: Path = OTHER) -> str:
    """The targets on another machine, as far as its runs tell them; a step; tiles; 16 bits."""
    records = kept(folder)
    if "seeds" in records:  # the later run, of small layers
        records = {"seeds": records["seeds"], **records}
    all_targets = (*targets.TARGETS, *targets.DECODING)
    told = [t for t in all_targets if t.met(records) != targets.NOT_MEASURED]
    layers = [records[name] for name in ("seeds", "layers", "presets") if name in records]
    described = [targets.table(records, told), beside_peers(*layers)]
    for name, of in {"blocked": parts, "tiles": tiles, "steps": steps}.items():
        if (folder / f"profile/{name}.json").exists():
            described.append(of(measuring.kept(name, folder / "profile")))
    in_16_bits = kept(folder / "half")
    return "\n\n".join([*described, *([half(in_16_bits)] if in_16_bits else [])])


def beside_peers(*records: Record) -> str:
    """Ours beside the fastest of JAX's other implementations, in each workload and mode.

    A workload is of the first record that has it.
    """
    of_workload = {
        row.workload: record for record in reversed(records) for row in reversed(record.rows)
    }
    rows = []
    for workload, record in reversed(of_workload.items()):
        for mode in dict.fromkeys(row.mode for row in record.rows if row.workload == workload):
            here = targets.rows(record, lambda other, w=workload: other == w, mode)
            peers = [here[name] for name in targets.LAYER_PEERS if name in here]
            if (ours := here.get(OURS)) is None or not peers:
                continue
            fastest = min(peers, key=lambda row: row.median_s)
            over = targets.slower("", ours, fastest).text.removeprefix(": ")
            taken = f"{1e6 * ours.median_s:,.0f}"
            rows.append((workload.name, mode, taken, fastest.implementation, over))
    head = ("layer", "pass", "µs", "the fastest peer", "ours over its time")
    return (
        "Layers beside the fastest of `jax.nn`, flax, keras and equinox (target: at most 1.05 of "
        f"its time, wherever there is one):\n\n{table(head, rows)}"
    )


def half(records: dict[str, Record]) -> str:
    """Ours beside torch's SDPA, in arrays of 16 bits."""
    rows = []
    for record in records.values():
        sdpa = {(r.workload, r.mode): r for r in record.rows if r.implementation == "sdpa"}
        for row in record.rows:
            if row.implementation != OURS or not row.seconds:
                continue
            theirs = sdpa[row.workload, row.mode]
            what = f"{row.workload.dtype}, {row.workload.name}, {row.mode}"
            taken = (f"{1e3 * r.median_s:.0f}" for r in (row, theirs))
            ratio = targets.slower(what, theirs, row).value
            rows.append((what, *taken, f"{ratio:.2f}", f"{row.error_ratio:.2f}"))
    head = ("what", "ms", "SDPA's ms", "times as fast", "RMS error over SDPA's")
    return f"{table(head, rows)}\n\n{targets.places(records)}"


def steps(profile: dict) -> str:
    """A step by a call, in a scan, and its two products alone, beside the machine's bound."""
    rates = profile["a second"]
    rows = [
        (name, *(f"{taken:.3f}" for taken in ms.values()), f"{ms['a call'] / ms['bound']:.2f}")
        for name, ms in profile["milliseconds"].items()
    ]
    ways = ("by a call", "in a `lax.scan`", "its two products")
    return (
        f"By `{SCRIPTS}/steps.py`, medians. The bound is the larger of the "
        f"step's bytes over this run's {rates['bytes'] / 1e9:.0f} GB/s and its FLOPs over this "
        f"run's {rates['FLOP'] / 1e9:.0f} GFLOP/s (target: at most 1.5 of it, at 8192 tokens):\n\n"
        + table(("one step, ms", *ways, "bound", "call over bound"), rows)
    )


# The beginnings of workloads' names -> what they are, and why torch is faster where it is.
_GROUPS = {
    "seeds/": ("a layer, {0}", "most of the time is spent reading weights, alike in both"),
    "layers/": ("a layer, {0}", "half of it is projections; see attention alone for the rest"),
    "long/": ("attention, {0} tokens", "XLA:CPU's two products alone take most of SDPA's time"),
    "decode/": ("a decode step, {0}", "XLA:CPU's products with cached keys; the cost of a call"),
}


def _beside_torch(runs: Sequence[Mapping[str, Record]]) -> list[tuple[str, Ratio, str]]:
    """(what, our speed over SDPA's, why it may be less), the fastest first, where they differ."""
    found: dict[str, tuple[Ratio, str]] = {}
    for row in (row for each in runs for record in each.values() for row in record.rows):
        start = next((s for s in _GROUPS if row.workload.name.startswith(s)), None)
        if row.implementation == OURS and row.ratio and row.ratio.side and start:
            words_of_group, why = _GROUPS[start]
            what = words_of_group.format(row.workload.name.removeprefix(start))
            found.setdefault(f"{what}, {row.mode}", (row.ratio, why))
    ranked = sorted(found.items(), key=lambda item: -item[1][0].median)
    return [(what, ratio, why) for what, (ratio, why) in ranked]


def speed(*runs: Mapping[str, Record]) -> str:
    """Where XLA is faster than torch's SDPA, where torch is, and why, each the largest first."""
    ranked = _beside_torch(runs)
    faster = [(what, words.ratio(r)) for what, r, _ in ranked if r.side > 0]
    slower = [(what, words.ratio(r), why) for what, r, why in reversed(ranked) if r.side < 0]
    return "\n\n".join(
        [
            table(("XLA is faster", "times as fast as torch's SDPA"), faster),
            table(("torch is faster", "XLA, times as fast", "why"), slower),
        ]
    )


def speed_in_short(*runs: Mapping[str, Record]) -> dict[str, str]:
    """Of the same rows the two ends: where XLA gains most, and where it loses most and why."""
    if not (ranked := _beside_torch(runs)):
        return {"XLA beside torch's SDPA": "not measured yet"}
    (best, gain, _), (worst, loss, why) = ranked[0], ranked[-1]
    faster = sum(ratio.side > 0 for _, ratio, _ in ranked)
    return {
        "CPU workloads that differ in speed": f"XLA is faster than torch's SDPA in {faster} of "
        f"{len(ranked)}, at most {words.digits(gain.median)} times: {best}",
        "where torch is faster": f"at most {words.digits(1 / loss.median)} times: {worst}; {why}",
    }


def tiles(profile: dict) -> str:
    """Whether other tiles are faster, by workload."""
    measured = [(row, dict(row["over shipped"])) for row in profile["rows"]]
    ms = [f"{over.pop('milliseconds'):.0f}" for _, over in measured]
    names = dict.fromkeys(name for _, over in measured for name in over)
    rows = []
    for (row, over), taken in zip(measured, ms, strict=True):
        causal = ", causal" if row["is_causal"] else ""
        what = f"{row['dtype']}, {row['H']}, {row['L']:,}{causal}"
        ratios = (f"{over[name]:.2f}" if name in over else "–" for name in names)
        rows.append((what, taken, *ratios))
    sizes = (f"{size} ({level})" for level, size in profile["caches"].items())
    head = ("dtype, H, L", "ms", *names)
    return (
        "Forward and backward of 8 heads, in the tiles that are shipped; then the time in "
        f"other tiles over that time, by `{SCRIPTS}/tiles.py`, on "
        f"{profile['environment']['processor']} with caches of {', '.join(sizes)}. A dash "
        f"stands for limits that give the same tiles.\n\n{table(head, rows)}"
    )


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
        f"By `{SCRIPTS}/parts.py`: a forward pass at L = 2048 takes "
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
