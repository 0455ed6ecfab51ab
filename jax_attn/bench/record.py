"""The record of a run: plain data that can be stored, shown and compared without a framework."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

from jax_attn.bench.workload import DECODE, PREFILL, PairWorkload, Workload

SCHEMA = "jax-attn bench 1"
# Keys of a record's settings.
MATRIX_PRODUCTS, JUDGED_ROWS = "matrix_product_flops_per_s", "judged_rows"
READS = "memory_bytes_per_s"


class Status(StrEnum):
    """The status of a measurement. Only MEASURED ones have times."""

    MEASURED = "measured"
    EXCLUDED = "excluded"  # it disagrees with the reference
    FAILED = "failed"  # it raised, or its process died
    ABSENT = "absent"  # its package is not installed
    NOT_RUN = "not run"  # it cannot serve the workload, does not fit, or was not reached


@dataclass(frozen=True)
class Ratio:
    """A ratio of two median times, and its bootstrap interval [low, high] over rounds."""

    median: float
    low: float
    high: float

    @property
    def side(self) -> int:
        """1 if the whole interval lies above 1, -1 if it lies below, 0 if it contains 1."""
        return (self.low > 1) - (self.high < 1)


@dataclass(frozen=True)
class Measurement:
    """One implementation on one workload in one mode. None stands for what is not known.

    reason: why there is no time, or a note. kernel: the kernel that actually ran.
    verdict: PASS, FAIL or INCONCLUSIVE. tensor: the tensor whose error is the largest multiple of
    torch SDPA's. error, reference_error: the RMS errors of that tensor against float64, divided by
    its scale: the implementation's and torch SDPA's.
    compile_s, first_call_s: seconds to compile, and seconds of the first call after compiling.
    seconds: seconds of one call, one number per round from the first round on; a slow
    implementation leaves before the last round, the baseline never does. dispatch: for each round,
    seconds until a call returns, before its result is ready; empty on a CPU, where most calls
    return with their result.
    ratio: the baseline's median time over this one's; above 1 is faster.
    peak_bytes: the most memory that a call holds, including its results, beyond what was held
    before: resident on a CPU, allocated on a GPU. compiler_bytes: temporaries, as the compiler
    reports them. cache_bytes: keys and values of the whole capacity of the cache.
    warm_compile_s: seconds to compile again with the compiler's cache on disk.
    programs: the number of further programs compiled for this mode and these inputs.
    operations: (path of a module, kind of operation, seconds of a call), the longest first.
    """

    workload: Workload | PairWorkload
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
    warm_compile_s: float | None = None
    programs: int | None = None
    operations: tuple[tuple[str, str, float], ...] = ()

    @property
    def median_s(self) -> float | None:
        return median(self.seconds) if self.seconds else None

    @property
    def dispatch_s(self) -> float | None:
        return median(self.dispatch) if self.dispatch else None

    @property
    def flops_per_s(self) -> float | None:
        return self._rate(self.workload.flops(self.mode))

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second that it reads into its cache, over all rows of the batch."""
        w = self.workload
        if isinstance(w, PairWorkload):
            read = {PREFILL: w.length, DECODE: 1}.get(self.mode)
            return read and self._rate(read)
        return self._rate(w.B * w.T) if w.room else None

    @property
    def cached_bytes_per_s(self) -> float | None:
        """`Workload.cached_bytes` over its time; other reads do not count."""
        w = self.workload
        return self._rate(w.cached_bytes) if isinstance(w, Workload) and w.room else None

    @property
    def read_bytes_per_s(self) -> float | None:
        """`PairWorkload.read` over its time; None if the workload is not a pair."""
        w = self.workload
        least = dict(w.read).get(self.mode) if isinstance(w, PairWorkload) else None
        return None if least is None else self._rate(least)

    def _rate(self, amount: float) -> float | None:
        return None if self.median_s is None else amount / self.median_s

    @property
    def error_ratio(self) -> float | None:
        """Its error over torch SDPA's own."""
        if self.error is None or not self.reference_error:
            return None
        return self.error / self.reference_error


# Properties that a measurement's JSON also contains, for readers without this package.
_DERIVED = ("median_s", "dispatch_s", "tokens_per_s", "cached_bytes_per_s")


@dataclass(frozen=True)
class Record:
    """One run of the bench on one machine.

    environment: machine and versions. settings: threads, precision, rounds, seed, baseline.
    roofline: precision name → the best FLOP/s of a matrix product in this run.
    rows: the measurements, as far as they got if the run was interrupted.
    compiled: the TPU compiler's figures for the same workloads.
    """

    environment: Mapping[str, Any]
    settings: Mapping[str, Any]
    roofline: Mapping[str, float]
    rows: tuple[Measurement, ...]
    interrupted: bool = False
    compiled: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> str:
        from jax_attn.parity.judge.text import (
            finite,  # imports NumPy, which the command's help does not need
        )

        plain = asdict(self) | {"schema": SCHEMA}
        for fields, row in zip(plain["rows"], self.rows, strict=True):
            fields["flops"] = row.workload.flops(row.mode)
            fields.update((name, getattr(row, name)) for name in _DERIVED)
        return json.dumps(finite(plain), indent=1)

    @classmethod
    def from_json(cls, text: str, name: str = "record") -> "Record":
        """Parse a record. Raises ValueError, with `name`, if the text does not fit the schema."""
        try:
            plain = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}: expected JSON, {error}") from None
        schema = plain.pop("schema", None) if isinstance(plain, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"{name}: expected schema {SCHEMA!r}, got {schema!r}")
        try:
            rows = tuple(_measurement(row) for row in plain.pop("rows"))
            return cls(rows=rows, compiled=tuple(plain.pop("compiled")), **plain)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"{name}: does not fit schema {SCHEMA!r}: {why}") from None

    @classmethod
    def read(cls, path: Path) -> "Record":
        return cls.from_json(Path(path).read_text(), str(path))


def _workload(**fields: Any) -> Workload | PairWorkload:
    if "counted" not in fields:
        return Workload(**fields)
    plain = {name: tuple(map(tuple, fields.get(name, ()))) for name in ("counted", "read")}
    return PairWorkload(**fields | plain)


def _measurement(plain: Mapping[str, Any]) -> Measurement:
    fields = {name: value for name, value in plain.items() if name not in ("flops", *_DERIVED)}
    fields["workload"] = _workload(**plain["workload"])
    fields["status"] = Status(plain["status"])
    fields["seconds"] = tuple(plain["seconds"])
    fields["dispatch"] = tuple(plain.get("dispatch", ()))
    fields["operations"] = tuple(map(tuple, plain.get("operations", ())))
    if ratio := plain["ratio"]:
        # An interval without an upper end is written as null: JSON has no infinity.
        high = math.inf if ratio["high"] is None else ratio["high"]
        fields["ratio"] = Ratio(**ratio | {"high": high})
    return Measurement(**fields)
