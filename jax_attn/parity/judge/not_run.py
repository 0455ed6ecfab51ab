"""What a run lists apart, without a verdict: compiled, lowered or refused, but not run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class NotRun:
    """A design, a kernel or a case that was not run, and how far it came.

    design: its name; a kernel's is "kernel splash", a refused row's that of its case.
    direction: forward, gradient or both. dtype, shape: of its inputs.
    level: compiled, lowered, failed (to compile or lower), not compiled, refused (by the kernel).
    target: the device or platform. error: why it came no further.
    figures: what the compiler counts: flops, flops_by, temporaries (bytes), seconds, ...
    """

    design: str
    direction: str
    dtype: str
    shape: str
    level: str
    target: str
    error: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; what was lowered has an `error` of None, what compiled has none."""
        plain = {
            "design": self.design,
            "direction": self.direction,
            "dtype": self.dtype,
            "shape": self.shape,
            "level": self.level,
            "target": self.target,
            **self.figures,
        }
        if self.error is not None or self.level == "lowered":
            plain["error"] = self.error
        return plain
