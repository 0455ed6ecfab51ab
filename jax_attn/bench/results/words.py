"""Format figures, workloads and machines for tables, plots and comparisons."""

import math
from collections.abc import Mapping
from typing import Any

from jax_attn.bench.implementations import OURS
from jax_attn.bench.record import JUDGED_ROWS, MATRIX_PRODUCTS, READS, Ratio, Record
from jax_attn.bench.workload import PairWorkload, Workload

DASH = "–"
MIB = 2**20
INTERRUPTED = "interrupted: these are the rows measured before that"
_PORT = "jax.jit"
"""The first word of a user's port among the ways to run a pair."""


def is_ours(implementation: str) -> bool:
    return implementation.split()[0] in (OURS, _PORT)


def seconds(x: float | None) -> str:
    return _scaled(x, {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9})


def size(n: float | None) -> str:
    """Format bytes in the unit that fits."""
    return _scaled(n, {"GiB": 2**30, "MiB": MIB, "KiB": 2**10, "B": 1})


def _scaled(x: float | None, units: dict[str, float]) -> str:
    """Format three digits in the largest unit that is not above x, else in the smallest unit."""
    if x is None:
        return DASH
    # A number that rounds to 1000 of a unit is 1 of the next larger one.
    fitting = (unit for unit, one in units.items() if x >= 0.9995 * one)
    unit = next(fitting, list(units)[-1])
    return f"{digits(x / units[unit])} {unit}"


def digits(x: float | None) -> str:
    """Format three significant digits without an exponent; a dash for None and NaN."""
    if x is None or math.isnan(x):
        return DASH
    if math.isinf(x):
        return "∞"
    # Use the exponent after rounding: that of 0.9999 is the exponent of 1.
    places = 2 - int(f"{x:.2e}".partition("e")[2])
    return f"{round(x, places):,.{max(places, 0)}f}"


def mebibytes(n: int | None) -> str:
    return DASH if n is None else digits(n / MIB)


def count(n: int | None) -> str:
    return DASH if n is None else str(n)


def percent(x: float | None) -> str:
    """Format whole percent, with one decimal below ten."""
    return DASH if x is None else f"{100 * x:.{0 if x >= 0.0995 else 1}f}%"


def ratio(r: Ratio | None) -> str:
    """Format the ratio and its interval."""
    return DASH if r is None else f"{digits(r.median)} [{digits(r.low)}, {digits(r.high)}]"


def shape(w: Workload | PairWorkload) -> str:
    """Format a workload's sizes, in the letters of the dimension key, or a pair's inputs."""
    if isinstance(w, PairWorkload):
        return f"inputs {w.inputs}"
    heads = f"N={w.N}" if w.K == w.N else f"N={w.N} K={w.K}"
    lengths = f"T={w.T}" if w.S == w.T else f"T={w.T} S={w.S}"
    lengths += f" room={w.room}" if w.room else ""
    width = f" D={w.D}" if w.layer else ""
    causal = ", causal" if w.is_causal else ""
    what = "layer" if w.layer else "attention"
    return f"{what}, B={w.B} {lengths} {heads} H={w.H}{width}{causal}, {w.dtype}"


def environment(record: Record) -> dict[str, str]:
    """Return machine, versions, settings and roofline, each as text."""
    at = record.environment
    machine = [at["processor"], f"{at['cores']} cores", *at["devices"], at["platform"]]
    if "load_average" in at:
        machine.append(f"load {at['load_average']:.2f} at the start")
    packages = [f"{name} {version}" for name, version in at["packages"].items()]
    settings = [
        f"{name.replace('_', ' ')} {_plain(value)}"
        for name, value in record.settings.items()
        # Shown with the rooflines, and with each workload.
        if name not in (MATRIX_PRODUCTS, READS, JUDGED_ROWS)
    ]
    roofline = [f"{name} {giga(rate)} GFLOP/s" for name, rate in record.roofline.items()]
    products = record.settings.get(MATRIX_PRODUCTS, {})
    products = [f"by {name} {giga(rate)}" for name, rate in products.items()]
    told = {
        "machine": machine,
        "versions": ["Python " + at["python"], *packages],
        "settings": settings,
        "GEMM roofline of this run": roofline + products or [DASH],
    }
    if reads := record.settings.get(READS):
        rates = [f"by {name} {giga(rate)}" for name, rate in reads.items()]
        told["memory roofline of this run, GB/s"] = rates
    return {name: ", ".join(parts) for name, parts in told.items()}


def place(record: Record) -> list[str]:
    """Return the environment, one line each, and whether the run was interrupted."""
    lines = [f"{name}: {told}" for name, told in environment(record).items()]
    return [*lines, INTERRUPTED] if record.interrupted else lines


def judged(record: Record, workload: Workload | PairWorkload) -> str:
    """Return on how many queries the verdicts rest, or "" if the record does not say."""
    rows = record.settings.get(JUDGED_ROWS, {}).get(workload.name)
    return f"judged on {rows} queries" if rows else ""


def giga(rate: float | None) -> str:
    return DASH if rate is None else digits(rate / 1e9)


def _plain(value: Any) -> str:
    """Format a setting; a mapping as its parts."""
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{name} {_plain(part)}" for name, part in value.items()) + ")"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
