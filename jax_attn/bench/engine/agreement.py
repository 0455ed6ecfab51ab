"""What the judge says of one implementation: crosses processes, so that it needs no framework."""

from dataclasses import dataclass

from jax_attn.parity.judge.compare import Verdict


@dataclass(frozen=True)
class Agreement:
    """The verdict on one implementation in one mode.

    error, reference_error: RMS against float64 over the tensor's scale, its own and torch
    SDPA's, of `tensor`: where its own is the largest multiple of SDPA's. What is zero in theory
    has no scale and is left out.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    tensor: str = ""
    error: float | None = None
    reference_error: float | None = None
