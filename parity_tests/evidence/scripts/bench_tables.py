"""What the docs say of the bench: its targets, where the time goes, and the plot."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import targets
from measuring import DATA, PROFILE

from jax_attn.bench.implementations import OURS
from jax_attn.bench.record import Ratio, Record
from jax_attn.bench.results import plot, words

BENCH = DATA / "bench"
CACHED = BENCH / "cached"
HALF = BENCH / "half"
OTHER, AVX2 = BENCH / "other", BENCH / "avx2"
PARTS = PROFILE / "blocked.json"
STEPS = PROFILE / "steps.json"
TILES = PROFILE / "tiles.json"
SHARDING = PROFILE / "sharding.json"
PLOT = BENCH / "time.svg"
MOST_TEMPORARIES = 128 * words.MIB
PLOTTED = "time-attention-1x8x64-float32-forward"
ROOT = Path(__file__).parents[3]


def bench(benchmarks: dict[str, Record]) -> str:
    """The targets, and the plot."""
    if not benchmarks:
        return "Not yet measured."
    plotted = f"![time of one call against length](../../{PLOT.relative_to(ROOT)})"
    profiles = f"{parts(json.loads(PARTS.read_text()))}\n\n{tiles(json.loads(TILES.read_text()))}"
    return f"{targets.table(benchmarks)}\n\n{profiles}\n\n{plotted}"


def decode(cached: dict[str, Record]) -> str:
    """The targets of a decode step, and what it is spent on."""
    if not cached:
        return "Not yet measured."
    return f"{targets.table(cached, targets.DECODING)}\n\n{steps(json.loads(STEPS.read_text()))}"


def other(folder: Path = OTHER) -> str:
    """The targets on another machine, as far as its runs tell them; a step; tiles; 16 bits."""
    records = kept(folder)
    if "seeds" in records:  # the later run, of small layers
        records = {"seeds": records["seeds"], **records}
    all_targets = (*targets.TARGETS, *targets.DECODING)
    told = [t for t in all_targets if t.met(records) != targets.NOT_MEASURED]
    profiles = {path.stem: json.loads(path.read_text()) for path in folder.glob("profile/*.json")}
    layers = [records[name] for name in ("seeds", "layers", "presets") if name in records]
    described = [targets.table(records, told), beside_peers(*layers), parts(profiles["blocked"])]
    described += [tiles(profiles["tiles"])] if "tiles" in profiles else []
    described += [steps(profiles["steps"])]
    in_16_bits = kept(folder / "half")
    return "\n\n".join([*described, *([half(in_16_bits)] if in_16_bits else [])])


def beside_peers(*records: Record) -> str:
    """Ours beside the fastest of JAX's other implementations, in each workload and mode.

    A workload is of the first record that has it.
    """
    rows = ["| layer | pass | µs | the fastest peer | ours over its time |", "|---" * 5 + "|"]
    of_workload = {
        row.workload: record for record in reversed(records) for row in reversed(record.rows)
    }
    for workload, record in reversed(of_workload.items()):
        for mode in dict.fromkeys(row.mode for row in record.rows if row.workload == workload):
            here = targets.rows(record, lambda other, w=workload: other == w, mode)
            peers = [here[name] for name in targets.LAYER_PEERS if name in here]
            if (ours := here.get(OURS)) is None or not peers:
                continue
            fastest = min(peers, key=lambda row: row.median_s)
            over = targets.slower("", ours, fastest).text.removeprefix(": ")
            taken = f"{1e6 * ours.median_s:,.0f}"
            rows.append(
                f"| {workload.name} | {mode} | {taken} | {fastest.implementation} | {over} |"
            )
    said = (
        "Layers beside the fastest of `jax.nn`, flax, keras and equinox (target: at most 1.05 of "
        "its time, wherever there is one):"
    )
    return "\n".join([said, "", *rows])


def half(records: dict[str, Record]) -> str:
    """Ours beside torch's SDPA, in arrays of 16 bits."""
    rows = ["| | ms | SDPA's ms | times as fast | RMS error over SDPA's |", "|---" * 5 + "|"]
    for record in records.values():
        ours = [row for row in record.rows if row.implementation == OURS and row.seconds]
        for row in ours:
            sdpa = next(
                other
                for other in record.rows
                if (other.implementation, other.workload, other.mode)
                == ("sdpa", row.workload, row.mode)
            )
            what = f"{row.workload.dtype}, {row.workload.name}, {row.mode}"
            taken = " | ".join(f"{1e3 * r.median_s:.0f}" for r in (row, sdpa))
            ratio = targets.slower(what, sdpa, row).value
            rows.append(f"| {what} | {taken} | {ratio:.2f} | {row.error_ratio:.2f} |")
    places = (f"- {name}: {'; '.join(words.place(run))}" for name, run in records.items())
    return "\n".join([*rows, "", *places])


def steps(profile: dict) -> str:
    """A step by a call, in a scan, and its two products alone, beside the machine's bound."""
    rates, ways = profile["a second"], ["by a call", "in a `lax.scan`", "its two products"]
    rows = [f"| one step, ms | {' | '.join(ways)} | bound | call over bound |", "|---" * 6 + "|"]
    for name, ms in profile["milliseconds"].items():
        times = " | ".join(f"{taken:.3f}" for taken in ms.values())
        rows.append(f"| {name} | {times} | {ms['a call'] / ms['bound']:.2f} |")
    return "\n".join(
        [
            "By `parity_tests/evidence/scripts/steps.py`, medians. The bound is the larger of the "
            f"step's bytes over this run's {rates['bytes'] / 1e9:.0f} GB/s and its FLOPs over this "
            f"run's {rates['FLOP'] / 1e9:.0f} GFLOP/s (target: at most 1.5 of it, at 8192 tokens):",
            "",
            *rows,
        ]
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
    lines = ["| XLA is faster | times as fast as torch's SDPA |", "|---|---|"]
    lines += [f"| {what} | {words.ratio(r)} |" for what, r, _ in ranked if r.side > 0]
    lines += ["", "| torch is faster | XLA, times as fast | why |", "|---|---|---|"]
    slower = [each for each in reversed(ranked) if each[1].side < 0]
    lines += [f"| {what} | {words.ratio(r)} | {why} |" for what, r, why in slower]
    return "\n".join(lines)


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


def sharding(profile: dict) -> str:
    """What cutting attention over devices costs, and what is sent."""
    head = ["heads", "pass", "mesh", "implementation", "ms", "over one device", "sent"]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in profile["rows"]:
        sends = [f"{count} {kind}" for kind, count in row["sent"].items()]
        what = f"{', '.join(sends)}: {words.size(row['bytes'])}" if sends else "nothing"
        figures = f"{row['milliseconds']:.0f} | {row['over one device']:.2f} | {what}"
        named = " | ".join(row[name] for name in ("heads", "pass", "mesh", "implementation"))
        rows.append(f"| {named} | {figures} |")
    at = profile["environment"]
    said = (
        "Causal attention of 8 rows, 512 tokens and 8 heads of 64, float32, on eight CPU devices "
        f"that share {at['cores']} cores of {at['processor']}, by "
        "`parity_tests/evidence/scripts/sharding.py`, with jax "
        f"{at['packages']['jax']}. The work and the cores are the same as on one device, so that "
        "a split that costs something takes more than 1.00 of its time. Less than 1.00 says that "
        "one device does not keep all cores busy:"
    )
    return "\n".join([said, "", *rows])


def tiles(profile: dict) -> str:
    """Whether other tiles are faster, by workload."""
    names = dict.fromkeys(
        name for row in profile["rows"] for name in row["over shipped"] if name != "milliseconds"
    )
    rows = [f"| dtype, H, L | ms | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for row in profile["rows"]:
        over = row["over shipped"]
        ratios = (f"{over[name]:.2f}" if name in over else "–" for name in names)
        causal = ", causal" if row["is_causal"] else ""
        what = f"{row['dtype']}, {row['H']}, {row['L']:,}{causal}"
        rows.append(f"| {what} | {over['milliseconds']:.0f} | {' | '.join(ratios)} |")
    sizes = (f"{size} ({level})" for level, size in profile["caches"].items())
    return "\n".join(
        [
            "Forward and backward of 8 heads, in the tiles that are shipped; then the time in "
            "other tiles over that time, by `parity_tests/evidence/scripts/tiles.py`, on "
            f"{profile['environment']['processor']} with caches of {', '.join(sizes)}. A dash "
            "stands for limits that give the same tiles.",
            "",
            *rows,
        ]
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
