"""The speed targets, each a row: what it is, its bound, and how a record of the bench meets it."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import measuring

from jax_attn.bench import statistics
from jax_attn.bench.implementations import OURS
from jax_attn.bench.record import Measurement, Record
from jax_attn.bench.results import words
from jax_attn.bench.results.table import roofline_share
from jax_attn.bench.workload import Workload

FORWARD, BOTH, DECODE = "forward", "forward+backward", "decode"
BATCHES = (1, 8)
LENGTHS = (2048, 4096, 8192)
PEERS = ("jax.nn", "flax nnx", "keras")
LAYER_PEERS = (*PEERS, "equinox")
# How a group's workloads begin -> what they are, and whom all of them are compared with.
GROUPS = {
    "seeds/": ("small layers", LAYER_PEERS),
    "layers/": ("large layers", LAYER_PEERS),
    "long/": ("attention alone", PEERS),
}
NOT_MEASURED = "not measured"
Fits = Callable[[Workload], bool]


class Figure(NamedTuple):
    """value: None where the record lacks it. text: as it stands in the table."""

    value: float | None
    text: str


Figures = Callable[[Record], list[Figure]]


Bound = tuple[str, Callable[[float], bool] | None]
"""What is asked for, and whether a value meets it; None where it shall only be stated."""


class Target(NamedTuple):
    what: str
    bound: Bound
    figures: Figures

    def first_figures(self, runs: Mapping[str, Record]) -> list[Figure]:
        """Each figure of the first run that has it; one that none has, as of the last run."""
        of_runs = [self.figures(record) for record in runs.values()]
        return [
            next((f for f in alike if f.value is not None), alike[-1])
            for alike in zip(*of_runs, strict=True)
        ]

    def met(self, runs: Mapping[str, Record]) -> str:
        values = [figure.value for figure in self.first_figures(runs)]
        if not values or None in values:
            return NOT_MEASURED
        _, holds = self.bound
        if holds is None:
            return "–"
        return "yes" if all(map(holds, values)) else "missed"


# --- finding rows -------------------------------------------------------------------------


def of_sizes(**sizes: int) -> Fits:
    return lambda workload: all(getattr(workload, name) == n for name, n in sizes.items())


def attention(T: int, is_causal: bool = False) -> Fits:
    """Attention alone, 1×8×T×64."""
    return of_sizes(layer=False, B=1, T=T, S=T, N=8, K=8, H=64, is_causal=is_causal)


def layer(B: int, T: int, D: int) -> Fits:
    """A whole layer of 8 heads, not causal."""
    return of_sizes(layer=True, B=B, T=T, S=T, N=8, K=8, D=D, is_causal=False)


def step(B: int, K: int, S: int = 8192, room: int = 8192) -> Fits:
    """One token a row read into a cache that then holds S: 16 heads of 64."""
    return of_sizes(layer=False, B=B, T=1, S=S, N=16, K=K, H=64, room=room)


def rows(record: Record, fits: Fits, mode: str) -> dict[str, Measurement]:
    """implementation → its row, of those in float32 that agree and have times, of a whole run."""
    return {
        row.implementation: row
        for row in record.rows
        if fits(row.workload) and row.workload.dtype == "float32" and row.mode == mode
        if row.verdict == "PASS" and row.seconds and not record.interrupted
    }


def ours(record: Record, fits: Fits, mode: str) -> Measurement | None:
    return rows(record, fits, mode).get(OURS)


def slower(
    label: str, slow: Measurement | None, fast: Measurement | None, apart: bool = False
) -> Figure:
    """How many times the first's time is the second's.

    It is that of the rounds that both were in; apart: they have no rounds in common.
    """
    if slow is None or fast is None:
        return Figure(None, f"{label}: –")
    if apart:
        runs = ((row.seconds, [1.0] * len(row.seconds)) for row in (slow, fast))
        ratio = statistics.change(*runs)
    else:
        ratio = statistics.paired_ratio(*statistics.shared(slow.seconds, fast.seconds))
    return Figure(ratio.median, f"{label}: {words.ratio(ratio)}")


def over_fastest(here: dict[str, Measurement], peers: tuple[str, ...], label: str) -> Figure:
    """How many times the time of the fastest peer ours fits into; each must have been timed."""
    if lacking := [name for name in peers if name not in here]:
        return Figure(None, f"{label}: – (no {', '.join(lacking)})")
    fastest = min((here[name] for name in peers), key=lambda row: row.median_s)
    if len(peers) > 1:
        label += f" {fastest.implementation}"
    return slower(label, fastest, here.get(OURS))


# --- what the targets ask for ---------------------------------------------------------------


def over(peers: tuple[str, ...], *modes: str, of: Mapping[str, Fits]) -> Figures:
    """By mode and workload, how much faster ours is than the fastest of the peers."""

    def one(record: Record, mode: str, label: str) -> Figure:
        shown = f"{mode} {label}" if len(modes) > 1 else label
        return over_fastest(rows(record, of[label], mode), peers, shown)

    return lambda record: [one(record, mode, label) for mode in modes for label in of]


def of_roofline(record: Record) -> list[Figure]:
    def one(T: int) -> Figure:
        row = ours(record, attention(T), FORWARD)
        share = row and roofline_share(row, record)
        return Figure(share, f"{T}: {words.percent(share)}")

    return [one(T) for T in LENGTHS]


def against_peers(record: Record) -> list[Figure]:
    """By group of workloads, ours over the peer of JAX's against which it does worst."""

    def worst(start: str, words: str, peers: tuple[str, ...]) -> Figure:
        workloads = dict.fromkeys(
            row.workload for row in record.rows if row.workload.name.startswith(start)
        )
        figures = [
            slower(f"{words}, {mode} {w.name} {peer}", here.get(OURS), here[peer])
            for w in workloads
            for mode in (FORWARD, BOTH)
            for here in [rows(record, lambda other, w=w: other == w, mode)]
            for peer in peers
            if peer in here
        ]
        timed = {row.implementation for row in record.rows if row.workload in workloads}
        if not timed.issuperset(peers) or not figures:
            absent = ", ".join(peer for peer in peers if peer not in timed)
            return Figure(None, f"{words}: – (no {absent})" if absent else f"{words}: –")
        lacking = [figure for figure in figures if figure.value is None]
        return lacking[0] if lacking else max(figures, key=lambda figure: figure.value or 0)

    return [worst(start, words, peers) for start, (words, peers) in GROUPS.items()]


def errors(record: Record) -> list[Figure]:
    """Our RMS error over torch SDPA's own, of the tensor where it is largest."""

    def one(mode: str, T: int) -> Figure:
        row = ours(record, attention(T), mode)
        error = row and row.error_ratio
        return Figure(error, f"{mode} {T}: {words.digits(error)}")

    return [one(mode, T) for mode in (FORWARD, BOTH) for T in LENGTHS]


def ours_over_ours(mode: str, pairs: Mapping[str, tuple[Fits, Fits]]) -> Figures:
    """By label, how many times our time on the one workload is that on the other."""
    return lambda record: [
        slower(label, *(ours(record, fits, mode) for fits in pair), apart=True)
        for label, pair in pairs.items()
    ]


def steps_over(K: int) -> Figures:
    """By batch, how much faster our step is than torch's SDPA with a cache written in place."""

    def figures(record: Record) -> list[Figure]:
        by_batch = {B: rows(record, step(B, K), DECODE) for B in BATCHES}
        return [slower(f"B={B}", here.get("sdpa"), here.get(OURS)) for B, here in by_batch.items()]

    return figures


def smaller_cache(record: Record) -> list[Figure]:
    """By batch, how many times the multi-query cache the multi-head cache is."""

    def one(B: int) -> Figure:
        pair = [ours(record, step(B, K), DECODE) for K in (16, 1)]
        if None in pair:
            return Figure(None, f"B={B}: –")
        many, few = (row.cache_bytes for row in pair)
        return Figure(many / few, f"B={B}: {words.size(many)} to {words.size(few)}")

    return [one(B) for B in BATCHES]


def at_least(bound: float, of: str) -> Bound:
    return f"≥ {bound} {of}", lambda value: value >= bound


def at_most(bound: float, of: str) -> Bound:
    return f"≤ {bound}{of}", lambda value: value <= bound


FULL = {str(T): attention(T) for T in LENGTHS}
CAUSAL = {str(T): attention(T, is_causal=True) for T in LENGTHS}
SMALL, LARGE = (
    {"×".join(map(str, sizes)): layer(*sizes) for sizes in layers}
    for layers in (((1, 10, 512), (2, 10, 512)), ((8, 512, 512), (2, 2048, 512)))
)
FAST, OF_THE_TIME = "times as fast", " of the time"
SDPA, JAX_NN = ("sdpa",), ("jax.nn",)
TARGETS = (
    Target(
        "forward, 1×8×L×64, over torch SDPA", at_least(0.85, FAST), over(SDPA, FORWARD, of=FULL)
    ),
    Target(
        "causal forward over torch SDPA's", at_least(0.85, FAST), over(SDPA, FORWARD, of=CAUSAL)
    ),
    Target(
        "forward and backward over torch SDPA's", at_least(0.9, FAST), over(SDPA, BOTH, of=FULL)
    ),
    Target("forward over `jax.nn`'s", at_least(3, FAST), over(JAX_NN, FORWARD, of=FULL)),
    Target("forward, of the run's GEMM roofline", ("none", None), of_roofline),
    Target(
        "causal over full",
        at_most(0.58, OF_THE_TIME),
        ours_over_ours(FORWARD, {label: (CAUSAL[label], FULL[label]) for label in FULL}),
    ),
    Target(
        "the slowest against `jax.nn`, flax, keras or equinox",
        at_most(1.05, OF_THE_TIME),
        against_peers,
    ),
    Target(
        "small layers, forward and backward, over the fastest JAX peer",
        at_least(1.0, FAST),
        over(LAYER_PEERS, BOTH, of=SMALL),
    ),
    Target(
        "large layers over torch SDPA", at_least(1.0, FAST), over(SDPA, FORWARD, BOTH, of=LARGE)
    ),
    Target("RMS error over torch SDPA's own", at_most(1.15, ""), errors),
)


# A decode step with S = 8,192 and 16 heads of 64: all of one run, `--preset decode`.
DECODING = (
    Target(
        "decode step, multi-query over multi-head",
        at_least(12, "times the tokens/s"),
        ours_over_ours(DECODE, {f"B={B}": (step(B, 16), step(B, 1)) for B in BATCHES}),
    ),
    Target("its cache", ("16 times smaller", lambda times: times >= 16), smaller_cache),
    Target(
        "decode step, multi-head, over torch SDPA with an in-place cache",
        at_least(1.0, FAST),
        steps_over(16),
    ),
    Target("the same, multi-query", at_least(1.5, FAST), steps_over(1)),
    Target(
        "decode step of 512 tokens, in a longer cache over one of 512",
        at_most(1.15, OF_THE_TIME),
        ours_over_ours(
            DECODE, {"32,768 places over 512": (step(1, 16, 512, 32768), step(1, 16, 512, 512))}
        ),
    ),
)


def table(runs: Mapping[str, Record], targets: Sequence[Target] = TARGETS) -> str:
    """The targets as a Markdown table, and what the runs were.

    runs: name → record; a figure is of one of them, the first that has it, and no ratio of two.
    """
    shown = [
        (t.what, t.bound[0], "<br>".join(f.text for f in t.first_figures(runs)), t.met(runs))
        for t in targets
    ]
    head = ("what", "target", "measured [95% interval]", "met?")
    return f"{measuring.table(head, shown)}\n\n{places(runs)}"


def places(runs: Mapping[str, Record]) -> str:
    """Where each run was made."""
    return "\n".join(f"- {name}: {'; '.join(words.place(run))}" for name, run in runs.items())


def merged(runs: Mapping[str, Record]) -> Record:
    """One record of them all, for figures that are no ratios: each workload from the first run.

    Its environment and settings are those that all the runs have alike.
    """
    measured: dict[Workload, tuple[Measurement, ...]] = {}
    for record in runs.values():
        for workload in dict.fromkeys(row.workload for row in record.rows):
            measured.setdefault(workload, tuple(r for r in record.rows if r.workload == workload))
    ordered = sorted(measured, key=lambda w: (w.layer, w.is_causal, w.T))
    return Record(
        environment=_alike([record.environment for record in runs.values()]),
        settings=_alike([record.settings for record in runs.values()]),
        roofline={},
        rows=tuple(row for workload in ordered for row in measured[workload]),
    )


def _alike(mappings: Sequence[Mapping]) -> dict:
    first, *others = mappings
    return {k: v for k, v in first.items() if all(k in x and x[k] == v for x in others)}
