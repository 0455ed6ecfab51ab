"""The speed targets, each a row: what it is, its bound, and how a record of the bench meets it."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

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
SMALL = ((1, 10, 512), (2, 10, 512))
LARGE = ((8, 512, 512), (2, 2048, 512))
# How a group's workloads begin -> what they are, and whom all of them are compared with.
GROUPS = {
    "seeds/": ("small layers", LAYER_PEERS),
    "layers/": ("large layers", LAYER_PEERS),
    "long/": ("attention alone", PEERS),
}
NOT_MEASURED = "not measured"


class Figure(NamedTuple):
    """value: None where the record lacks it. text: as it stands in the table."""

    value: float | None
    text: str


class Target(NamedTuple):
    """holds: whether a value meets it; None where it asks for no more than to be stated."""

    what: str
    bound: str
    holds: Callable[[float], bool] | None
    figures: Callable[[Record], list[Figure]]

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
        if self.holds is None:
            return "–"
        return "yes" if all(map(self.holds, values)) else "missed"


# --- finding rows -------------------------------------------------------------------------


def attention(T: int, is_causal: bool = False) -> Callable[[Workload], bool]:
    """Attention alone, 1×8×T×64."""
    sizes = (False, 1, T, T, 8, 8, 64, is_causal)
    return lambda w: (w.layer, w.B, w.T, w.S, w.N, w.K, w.H, w.is_causal) == sizes


def layer(B: int, T: int, D: int) -> Callable[[Workload], bool]:
    """A whole layer of 8 heads, not causal."""
    sizes = (True, B, T, T, 8, 8, D, False)
    return lambda w: (w.layer, w.B, w.T, w.S, w.N, w.K, w.D, w.is_causal) == sizes


def step(B: int, K: int, S: int = 8192, room: int = 8192) -> Callable[[Workload], bool]:
    """One token a row read into a cache that then holds S: 16 heads of 64."""
    sizes = (False, B, 1, S, 16, K, 64, room)
    return lambda w: (w.layer, w.B, w.T, w.S, w.N, w.K, w.H, w.room) == sizes


def rows(record: Record, fits: Callable[[Workload], bool], mode: str) -> dict[str, Measurement]:
    """implementation → its row, of those in float32 that agree and have times, of a whole run."""
    return {
        row.implementation: row
        for row in record.rows
        if fits(row.workload) and row.workload.dtype == "float32" and row.mode == mode
        if row.verdict == "PASS" and row.seconds and not record.interrupted
    }


def slower(label: str, slow: Measurement | None, fast: Measurement | None) -> Figure:
    """How many times the first's time is the second's, in the rounds that both were in."""
    if slow is None or fast is None:
        return Figure(None, f"{label}: –")
    ratio = statistics.paired_ratio(*statistics.shared(slow.seconds, fast.seconds))
    return Figure(ratio.median, f"{label}: {words.ratio(ratio)}")


def apart(label: str, slow: Measurement | None, fast: Measurement | None) -> Figure:
    """How many times the first's time is the second's, which have no round in common."""
    if slow is None or fast is None:
        return Figure(None, f"{label}: –")
    times = ((row.seconds, [1.0] * len(row.seconds)) for row in (slow, fast))
    ratio = statistics.change(*times)
    return Figure(ratio.median, f"{label}: {words.ratio(ratio)}")


# --- what the targets ask for ---------------------------------------------------------------


def over(
    peers: tuple[str, ...], mode: str, is_causal: bool = False
) -> Callable[[Record], list[Figure]]:
    """By length, how much faster ours is than the fastest of the peers."""
    return lambda record: [
        over_fastest(rows(record, attention(T, is_causal), mode), peers, str(T)) for T in LENGTHS
    ]


def over_fastest(here: dict[str, Measurement], peers: tuple[str, ...], label: str) -> Figure:
    """How many times the time of the fastest peer ours fits into; each must have been timed."""
    if lacking := [name for name in peers if name not in here]:
        return Figure(None, f"{label}: – (no {', '.join(lacking)})")
    fastest = min((here[name] for name in peers), key=lambda row: row.median_s)
    if len(peers) > 1:
        label += f" {fastest.implementation}"
    return slower(label, fastest, ours(here))


def ours(here: dict[str, Measurement]) -> Measurement | None:
    return here.get(OURS)


def of_roofline(record: Record) -> list[Figure]:
    def one(T: int) -> Figure:
        row = ours(rows(record, attention(T), FORWARD))
        share = row and roofline_share(row, record)
        return Figure(share, f"{T}: {words.percent(share)}")

    return [one(T) for T in LENGTHS]


def causal_over_full(record: Record) -> list[Figure]:
    return [
        apart(str(T), *(ours(rows(record, attention(T, c), FORWARD)) for c in (True, False)))
        for T in LENGTHS
    ]


def layers_over(
    layers: tuple[tuple[int, int, int], ...], peers: tuple[str, ...], *modes: str
) -> Callable[[Record], list[Figure]]:
    """By mode and layer, how much faster ours is than the fastest of the peers."""

    def one(record: Record, mode: str, sizes: tuple[int, int, int]) -> Figure:
        label = "×".join(map(str, sizes))
        label = f"{mode} {label}" if len(modes) > 1 else label
        return over_fastest(rows(record, layer(*sizes), mode), peers, label)

    return lambda record: [one(record, mode, sizes) for mode in modes for sizes in layers]


def against_peers(record: Record) -> list[Figure]:
    """By group of workloads, ours over the peer of JAX's against which it does worst."""

    def worst(start: str, words: str, peers: tuple[str, ...]) -> Figure:
        workloads = dict.fromkeys(
            row.workload for row in record.rows if row.workload.name.startswith(start)
        )
        figures = [
            slower(f"{words}, {mode} {w.name} {peer}", ours(here), here[peer])
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
        row = ours(rows(record, attention(T), mode))
        error = row and row.error_ratio
        return Figure(error, f"{mode} {T}: {words.digits(error)}")

    return [one(mode, T) for mode in (FORWARD, BOTH) for T in LENGTHS]


def steps_over(K: int) -> Callable[[Record], list[Figure]]:
    """By batch, how much faster our step is than torch's SDPA with a cache written in place."""

    def figures(record: Record) -> list[Figure]:
        by_batch = {B: rows(record, step(B, K), DECODE) for B in BATCHES}
        return [slower(f"B={B}", here.get("sdpa"), ours(here)) for B, here in by_batch.items()]

    return figures


def one_head_over_all(record: Record) -> list[Figure]:
    """By batch, the tokens a second of our multi-query step over our multi-head step's."""
    return [steps_apart(record, f"B={B}", step(B, 16), step(B, 1)) for B in BATCHES]


def smaller_cache(record: Record) -> list[Figure]:
    """By batch, how many times the multi-query cache the multi-head cache is."""

    def one(B: int) -> Figure:
        pair = [ours(rows(record, step(B, K), DECODE)) for K in (16, 1)]
        if None in pair:
            return Figure(None, f"B={B}: –")
        many, few = (row.cache_bytes for row in pair)
        return Figure(many / few, f"B={B}: {words.size(many)} to {words.size(few)}")

    return [one(B) for B in BATCHES]


def little_of_much(record: Record) -> list[Figure]:
    label = "32,768 places over 512"
    return [steps_apart(record, label, step(1, 16, 512, 32768), step(1, 16, 512, 512))]


def steps_apart(record: Record, label: str, slow: Callable, fast: Callable) -> Figure:
    return apart(label, *(ours(rows(record, fits, DECODE)) for fits in (slow, fast)))


def at_least(bound: float) -> Callable[[float], bool]:
    return lambda value: value >= bound


def at_most(bound: float) -> Callable[[float], bool]:
    return lambda value: value <= bound


TARGETS = (
    Target(
        "forward, 1×8×L×64, over torch SDPA",
        "≥ 0.85 times as fast",
        at_least(0.85),
        over(("sdpa",), FORWARD),
    ),
    Target(
        "causal forward over torch SDPA's",
        "≥ 0.85 times as fast",
        at_least(0.85),
        over(("sdpa",), FORWARD, is_causal=True),
    ),
    Target(
        "forward and backward over torch SDPA's",
        "≥ 0.9 times as fast",
        at_least(0.9),
        over(("sdpa",), BOTH),
    ),
    Target("forward over `jax.nn`'s", "≥ 3 times as fast", at_least(3), over(("jax.nn",), FORWARD)),
    Target("forward, of the run's GEMM roofline", "none", None, of_roofline),
    Target("causal over full", "≤ 0.58 of the time", at_most(0.58), causal_over_full),
    Target(
        "the slowest against `jax.nn`, flax, keras or equinox",
        "≤ 1.05 of the time",
        at_most(1.05),
        against_peers,
    ),
    Target(
        "small layers, forward and backward, over the fastest JAX peer",
        "≥ 1.0 times as fast",
        at_least(1),
        layers_over(SMALL, LAYER_PEERS, BOTH),
    ),
    Target(
        "large layers over torch SDPA",
        "≥ 1.0 times as fast",
        at_least(1),
        layers_over(LARGE, ("sdpa",), FORWARD, BOTH),
    ),
    Target("RMS error over torch SDPA's own", "≤ 1.15", at_most(1.15), errors),
)


# A decode step with S = 8,192 and 16 heads of 64: all of one run, `--preset decode`.
DECODING = (
    Target(
        "decode step, multi-query over multi-head",
        "≥ 12 times the tokens/s",
        at_least(12),
        one_head_over_all,
    ),
    Target("its cache", "16 times smaller", at_least(16), smaller_cache),
    Target(
        "decode step, multi-head, over torch SDPA with an in-place cache",
        "≥ 1.0 times as fast",
        at_least(1),
        steps_over(16),
    ),
    Target("the same, multi-query", "≥ 1.5 times as fast", at_least(1.5), steps_over(1)),
    Target(
        "decode step of 512 tokens, in a longer cache over one of 512",
        "≤ 1.15 of the time",
        at_most(1.15),
        little_of_much,
    ),
)


def table(runs: Mapping[str, Record], targets: Sequence[Target] = TARGETS) -> str:
    """The targets as a Markdown table, and what the runs were.

    runs: name → record; a figure is of one of them, the first that has it, and no ratio of two.
    """
    lines = ["| what | target | measured [95% interval] | met? |", "|---" * 4 + "|"]
    for target in targets:
        figures = "<br>".join(figure.text for figure in target.first_figures(runs))
        lines.append(f"| {target.what} | {target.bound} | {figures} | {target.met(runs)} |")
    lines += ["", *(f"- {name}: {'; '.join(words.place(run))}" for name, run in runs.items())]
    return "\n".join(lines)


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
