"""What the judge says of one implementation: crosses processes, so that it needs no framework."""

from dataclasses import dataclass

from jax_attn.parity.compare import Verdict


@dataclass(frozen=True)
class Agreement:
    """The verdict on one implementation in one mode.

    error, reference_error: RMS against float64 over the tensor's scale, of the tensor where
    the implementation's is largest; what is zero in theory has no scale and is left out.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    error: float | None = None
    reference_error: float | None = None
