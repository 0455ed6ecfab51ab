"""A record as a table of numbers, in units without prefixes, with a line per measurement."""

import csv as stdlib
import io
from collections.abc import Callable
from typing import Any

from jax_attn.bench.record import Measurement, Record
from jax_attn.bench.results.table import memory_share, roofline_share

COLUMNS: dict[str, Callable[[Measurement, Record], Any]] = {
    "workload": lambda row, _: row.workload.name,
    "dtype": lambda row, _: row.workload.dtype,
    "mode": lambda row, _: row.mode,
    "implementation": lambda row, _: row.implementation,
    "framework": lambda row, _: row.framework,
    "status": lambda row, _: row.status,
    "verdict": lambda row, _: row.verdict,
    "error over torch's": lambda row, _: row.error_ratio,
    "seconds": lambda row, _: row.median_s,
    "speed": lambda row, _: row.ratio and row.ratio.median,
    "speed from": lambda row, _: row.ratio and row.ratio.low,
    "speed to": lambda row, _: row.ratio and row.ratio.high,
    "FLOP/s": lambda row, _: row.flops_per_s,
    "of GEMM": roofline_share,
    "of memory": memory_share,
    "tokens/s": lambda row, _: row.tokens_per_s,
    "dispatch seconds": lambda row, _: row.dispatch_s,
    "compile seconds": lambda row, _: row.compile_s,
    "warm compile seconds": lambda row, _: row.warm_compile_s,
    "programs": lambda row, _: row.programs,
    "first call seconds": lambda row, _: row.first_call_s,
    "peak bytes": lambda row, _: row.peak_bytes,
    "compiler's bytes": lambda row, _: row.compiler_bytes,
    "reason": lambda row, _: row.reason,
}


def csv(record: Record) -> str:
    """Return all measurements as CSV, also those without a time; unknown cells are empty."""
    out = io.StringIO()
    writer = stdlib.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([cell(row, record) for cell in COLUMNS.values()] for row in record.rows)
    return out.getvalue()
