"""The judge's answer about one implementation. It crosses processes, so needs no framework."""

from dataclasses import dataclass

from jax_attn.parity.judge.compare import Verdict


@dataclass(frozen=True)
class Agreement:
    """The verdict on one implementation in one mode.

    tensor: the one whose error is the largest multiple of torch SDPA's. error, reference_error:
    its RMS error against float64 over its scale, the implementation's and SDPA's. Tensors that
    are zero in theory have no scale and are left out.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    tensor: str = ""
    error: float | None = None
    reference_error: float | None = None
