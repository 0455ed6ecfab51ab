"""A planted bug, the row designed to detect it, and the rows that claim to."""

from dataclasses import dataclass

from jax_attn.selfcheck.power.claims import Claim
from jax_attn.selfcheck.power.mutable_attention import Plants


@dataclass(frozen=True)
class ClaimedBug:
    """A bug that ports have.

    plants: the steps of attention that it makes wrong (keys of `mutable_attention.STEPS`).
    meant: (design, mask) of the float32 row that is designed to detect it.
    claim: whether a row claims to detect it at a precision.
    """

    plants: Plants
    meant: tuple[str, str]
    claim: Claim
