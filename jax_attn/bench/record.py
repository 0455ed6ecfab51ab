"""What a benchmark leaves behind: plain data, so that it can be stored, shown and compared.

Needs neither framework. One `Measurement` is one implementation on one workload in one mode.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from jax_attn.bench.workload import Workload

SCHEMA = "jax-attn bench 1"
MATRIX_PRODUCTS, JUDGED_ROWS = "matrix_product_flops_per_s", "judged_rows"  # of the settings


class Status(StrEnum):
    """What became of a row. Only what is MEASURED has times."""

    MEASURED = "measured"
    EXCLUDED = "excluded"  # its numbers did not agree with the reference's
    FAILED = "failed"  # it raised, or its process died
    ABSENT = "absent"  # its package is not installed
    NOT_RUN = "not run"  # it cannot serve the workload, would not fit, or its turn never came


@dataclass(frozen=True)
class Ratio:
    """Baseline time over this row's, so that above 1 is faster than the baseline.

    median, and a bootstrap interval [low, high] over rounds.
    """

    median: float
    low: float
    high: float

    @property
    def said(self) -> str:
        if self.low <= 1 <= self.high:
            return "no difference"
        return "faster" if self.low > 1 else "slower"


@dataclass(frozen=True)
class Measurement:
    """One implementation on one workload in one mode. What is not known is None.

    kernel: what actually ran. reason: why there is no time, or what was noted.
    verdict: PASS, FAIL or INCONCLUSIVE. error, reference_error: RMS against float64 over the
    scale of the tensor, its own and torch SDPA's, of `tensor`: where it is the largest multiple.
    compile_s, first_call_s: seconds to compile, and of the first call after it.
    seconds: of one call, one number a round, from the first round on: a slow implementation
    leaves before the last, the baseline never. flops: of one call. peak_bytes: resident (CPU) or
    allocated (GPU) at most during a call, with its results, beyond what was there before it.
    compiler_bytes: temporaries as the compiler states them. cache_bytes: keys and values in all
    the room that its cache has. dispatch: of each round, seconds until a call returned, its
    result still under way; () on a CPU, where most calls return with it.
    """

    workload: Workload
    mode: str
    implementation: str
    framework: str
    status: Status
    reason: str = ""
    kernel: str = ""
    verdict: str | None = None
    error: float | None = None
    reference_error: float | None = None
    compile_s: float | None = None
    first_call_s: float | None = None
    seconds: tuple[float, ...] = ()
    ratio: Ratio | None = None
    peak_bytes: int | None = None
    compiler_bytes: int | None = None
    tensor: str = ""
    cache_bytes: int | None = None
    dispatch: tuple[float, ...] = ()

    @property
    def median_s(self) -> float | None:
        return _median(self.seconds)

    @property
    def dispatch_s(self) -> float | None:
        return _median(self.dispatch)

    @property
    def flops_per_s(self) -> float | None:
        return self.workload.flops(self.mode) / self.median_s if self.seconds else None

    @property
    def tokens_per_s(self) -> float | None:
        """How many tokens it reads into its cache, all rows together."""
        timed = self.workload.room and self.seconds
        return self.workload.B * self.workload.T / self.median_s if timed else None

    @property
    def cached_bytes_per_s(self) -> float | None:
        """`Workload.cached_bytes` over its time: what else it reads does not count."""
        timed = self.workload.room and self.seconds
        return self.workload.cached_bytes / self.median_s if timed else None

    @property
    def error_ratio(self) -> float | None:
        """Its error over torch SDPA's own."""
        if self.error is None or not self.reference_error:
            return None
        return self.error / self.reference_error


def _median(seconds: tuple[float, ...]) -> float | None:
    if not seconds:
        return None
    ordered, n = sorted(seconds), len(seconds)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


# What a row's JSON has besides its fields, for who reads it without this package.
_DERIVED = ("median_s", "dispatch_s", "tokens_per_s", "cached_bytes_per_s")


@dataclass(frozen=True)
class Record:
    """One run of the bench on one machine.

    environment: machine and versions. settings: threads, precision, rounds, seed, baseline.
    roofline: precision name → the best FLOP/s of a matrix product in this run.
    interrupted: whether it ended early; the rows are then those measured so far.
    """

    environment: Mapping[str, Any]
    settings: Mapping[str, Any]
    roofline: Mapping[str, float]
    rows: tuple[Measurement, ...]
    interrupted: bool = False
    compiled: tuple[Mapping[str, Any], ...] = field(default=())

    def to_json(self) -> str:
        plain = asdict(self) | {"schema": SCHEMA}
        for row, given in zip(plain["rows"], self.rows, strict=True):
            row["flops"] = given.workload.flops(given.mode)
            row.update((name, getattr(given, name)) for name in _DERIVED)
        return json.dumps(finite(plain), indent=1)

    @classmethod
    def from_json(cls, text: str, name: str = "record") -> "Record":
        """Raises ValueError, naming `name`, where the text is no record of this schema."""
        try:
            plain = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}: expected JSON, {error}") from None
        found = plain.pop("schema", None) if isinstance(plain, dict) else None
        if found != SCHEMA:
            raise ValueError(f"{name}: expected schema {SCHEMA!r}, got {found!r}")
        try:
            rows = tuple(_row(row) for row in plain.pop("rows"))
            return cls(rows=rows, compiled=tuple(plain.pop("compiled")), **plain)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"{name}: not what schema {SCHEMA!r} has: {why}") from None

    @classmethod
    def read(cls, path: Path) -> "Record":
        return cls.from_json(Path(path).read_text(), str(path))


def _row(plain: dict[str, Any]) -> Measurement:
    given = {k: v for k, v in plain.items() if k not in ("flops", *_DERIVED)}
    given["workload"] = Workload(**plain["workload"])
    given["status"] = Status(plain["status"])
    given["seconds"] = tuple(plain["seconds"])
    given["dispatch"] = tuple(plain.get("dispatch", ()))
    given["ratio"] = _ratio(**plain["ratio"]) if plain["ratio"] else None
    return Measurement(**given)


def _ratio(median: float, low: float, high: float | None) -> Ratio:
    # An interval without an upper end is written as null: JSON has no infinity.
    return Ratio(median, low, math.inf if high is None else high)


def finite(x):
    """Plain data with null for what is no finite number."""
    if isinstance(x, dict):
        return {k: finite(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [finite(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
