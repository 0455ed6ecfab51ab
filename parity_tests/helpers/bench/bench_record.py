"""A record such as the bench leaves, with times from a simple model and seeded noise."""

from dataclasses import replace

import numpy as np

from jax_attn.bench import statistics
from jax_attn.bench.presets import PRESETS
from jax_attn.bench.record import Measurement, Record, Status
from jax_attn.bench.workload import FORWARD, MODES, PAIR_MODES, PairWorkload, Workload

ROUNDS = 11
ROOFLINE = 400e9

ENVIRONMENT = {
    "python": "3.11.7",
    "packages": {"jax-attn": "0.1.0", "jax": "0.10.2", "flax": "0.12.8", "torch": "2.13.0+cpu"},
    "platform": "Linux-6.1-x86_64",
    "processor": "Example CPU",
    "cores": 2,
    "devices": ["cpu: cpu"],
}
SETTINGS = {
    "threads": 2,
    "precision": "highest",
    "device": "cpu",
    "rounds": {"least": 7, "most": ROUNDS},
    "seed": 0,
    "baseline": "sdpa",
    "judged_rows": {f"long/{T}": f"128 of {T}" for T in (2048, 4096, 8192)},
    "matrix_product_flops_per_s": {"torch": 185e9, "jax": ROOFLINE},
}

# implementation: (framework, kernel, share of the roofline, bytes per score, error over SDPA's).
IMPLEMENTATIONS = {
    "torch eager": ("torch", "softmax(QKᵀ)V", 0.10, 8, 1.02),
    "sdpa": ("torch", "flash", 0.40, 0, 1.00),
    "torch.compile": ("torch", "inductor", 0.13, 4, 1.02),
    "flax nnx": ("jax", "nnx.dot_product_attention", 0.095, 8, 1.21),
    "jax.nn": ("jax", "xla", 0.092, 8, 1.21),
    "keras": ("jax", "xla", 0.09, 8, 1.21),
    "jax-attn dense": ("jax", "dense", 0.2, 8, 1.10),
    "jax-attn blocked": ("jax", "blocked", 0.695, 0, 1.08),
    "jax-attn": ("jax", "blocked", 0.70, 0, 1.08),
}
LAYERS_ALONE = {
    "nn.MultiheadAttention": ("torch", "fast path", 0.38, 0, 1.05),
    "equinox": ("jax", "XLA", 0.09, 8, 1.21),
}


def core(T: int, is_causal: bool = False) -> Workload:
    name = f"long/{T}" + ("/causal" if is_causal else "")
    return Workload(name, False, 1, T, T, 8, 8, 64, is_causal=is_causal)


def layer(B: int, T: int, D: int) -> Workload:
    preset = "layers" if T > 100 else "seeds"
    return Workload(f"{preset}/{B}x{T}x{D}", True, B, T, T, 8, 8, D // 8, D)


LONG = tuple(core(T, causal) for causal in (False, True) for T in (2048, 4096, 8192))
LAYERS = tuple(layer(*s) for s in ((2, 5, 64), (1, 10, 512), (2, 10, 512), (8, 512, 512)))
STEPS = PRESETS["decode"]
CACHED = ("sdpa", "torch eager", "jax.nn", "jax-attn")
CACHE_RATE = {"sdpa": 10e9, "torch eager": 8e9, "jax.nn": 2e9, "jax-attn": 16e9}  # bytes/s
WORKLOADS = (*LAYERS, layer(2, 2048, 512), *LONG, core(32768))


def noisy(mean: float, *named: str, seed: int) -> tuple[float, ...]:
    """Times around `mean`, drawn for these names; a busy machine only adds."""
    rng = np.random.default_rng([seed, *map(ord, "".join(named))])
    return tuple(float(x) for x in mean * (1 + 0.01 * rng.standard_exponential(ROUNDS)))


def seconds(w: Workload, mode: str, implementation: str, seed: int, slower: float) -> tuple:
    framework, _, share, per_score, _ = (IMPLEMENTATIONS | LAYERS_ALONE)[implementation]
    if w.room:  # by what is filled
        return noisy(
            5e-6 + w.cached_bytes / CACHE_RATE[implementation], w.name, implementation, seed=seed
        )
    # Only what skips hidden pairs gains by causality.
    full = w if not per_score else replace(w, is_causal=False)
    rate = share * ROOFLINE * (0.8 if mode == MODES[1] else 1.0)
    call = {"torch": 40e-6, "jax": 30e-6}[framework]
    mean = slower * (call + full.flops(mode) / rate)
    return noisy(mean, w.name, mode, implementation, seed=seed)


def row(
    w: Workload, mode: str, implementation: str, seed: int = 0, slower: float = 1.0
) -> Measurement:
    """One measured row; slower: multiplies its times."""
    framework, kernel, _, per_score, error = (IMPLEMENTATIONS | LAYERS_ALONE)[implementation]
    own = seconds(w, mode, implementation, seed, slower)
    scores = w.B * w.N * w.T * w.S * per_score
    called = {
        "compile_s": 0.4 if framework == "jax" else None,
        "first_call_s": 2 * own[0],
        "peak_bytes": scores + 8 * 2**20,
        "compiler_bytes": scores + 4 * 2**20 if framework == "jax" else None,
    }
    return Measurement(
        w,
        mode,
        implementation,
        framework,
        Status.MEASURED,
        kernel=kernel,
        verdict="PASS",
        error=(1.0 if w.room else error) * 1e-7,
        reference_error=1e-7,
        seconds=own,
        ratio=statistics.paired_ratio(seconds(w, mode, "sdpa", seed, 1.0), own),
        **({"cache_bytes": w.cached_bytes // w.S * w.room} if w.room else called),
    )


def step(w: Workload, implementation: str, seed: int = 0) -> Measurement:
    """One measured row of a workload with a cache."""
    return row(w, *w.modes, implementation, seed)


def steps(workloads=STEPS, **changed) -> Record:
    """A record of workloads with a cache; changed: fields of the record."""
    rows = tuple(step(w, name) for w in workloads for name in CACHED)
    return replace(Record(ENVIRONMENT, SETTINGS, {"float32": ROOFLINE}, rows), **changed)


def pair(lengths: tuple[int, ...] = (0,), modes=PAIR_MODES, verdict="PASS") -> Record:
    """A record of a user's pair, eager and jitted; verdict: the port's."""

    def measured(length: int, mode: str, way: str, framework: str) -> Measurement:
        w = PairWorkload(
            f"mine.py:make, length {length}" if length else "mine.py:make",
            f"x float32[{length or 7}, 5]",
            "float32",
            tuple((mode, 1000 * (length or 7)) for mode in modes),
            length,
            ((FORWARD, 140 + length),),
        )
        baseline, own = ((length or 7) * 1e-6 * np.arange(1, 6), (length or 7) * 5e-7)
        seconds = tuple(baseline if framework == "torch" else baseline - own)
        ratio = statistics.paired_ratio(tuple(baseline), seconds)
        return Measurement(
            w,
            mode,
            way,
            framework,
            Status.MEASURED,
            verdict=None if framework == "torch" else verdict,
            seconds=seconds,
            ratio=ratio,
        )

    ways = {"torch eager": "torch", "jax.jit": "jax"}
    rows = tuple(
        measured(length, mode, *way) for length in lengths for mode in modes for way in ways.items()
    )
    settings = SETTINGS | {"baseline": "torch eager"}
    return Record(ENVIRONMENT, settings, {"float32": ROOFLINE}, rows)


def unmeasured(w: Workload, mode: str) -> tuple[Measurement, ...]:
    """One row of each kind that has no time, of attention alone."""
    return (
        Measurement(
            w, mode, "equinox", "jax", Status.EXCLUDED, "output: 3.1 times its budget", "", "FAIL"
        ),
        Measurement(
            w, mode, "torchax", "torch", Status.ABSENT, "not installed: pip install torchax"
        ),
        Measurement(
            w, mode, "nn.MultiheadAttention", "torch", Status.NOT_RUN, "has no attention alone"
        ),
    )


COMPILED = {
    "level": "compiled: the compiler's figures, not measured",
    "workload": "long/2048",
    "mode": "forward",
    "kernel": "blocked",
    "target": "TPU v5 lite (v5e:2x2)",
    "compiler": "libtpu 0.0.42",
    "seconds": 7.5,
    "useful_flops": 8589934592,
    "flops": 8959000576.0,
    "bytes": 587736064.0,
    "temporaries": 134314496,
}


def record(workloads=WORKLOADS, slower=None, seed: int = 0, **changed) -> Record:
    """slower: implementation → what its times are multiplied by; changed: fields of the record."""
    rows = [
        measured
        for w in workloads
        for mode in MODES
        for measured in (
            *(row(w, mode, i, seed, (slower or {}).get(i, 1.0)) for i in IMPLEMENTATIONS),
            *((row(w, mode, i, seed) for i in LAYERS_ALONE) if w.layer else unmeasured(w, mode)),
        )
    ]
    whole = Record(ENVIRONMENT, SETTINGS, {"float32": ROOFLINE}, tuple(rows), compiled=(COMPILED,))
    return replace(whole, **changed)


def small(status=None, verdict=None, **more):
    """A record of one workload; with `status`, `verdict` and more in its last row."""
    whole = record()
    rows = [r for r in whole.rows if r.workload == whole.rows[0].workload and r.seconds]
    changes = {k: v for k, v in (("status", status), ("verdict", verdict)) if v}
    return replace(whole, rows=(*rows[:-1], replace(rows[-1], **changes, **more)))
