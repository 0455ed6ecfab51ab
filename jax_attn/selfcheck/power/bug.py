"""A planted bug: what goes wrong, the row made to catch it, the rows that claim to."""

from dataclasses import dataclass

from jax_attn.selfcheck.power.claims import Claim
from jax_attn.selfcheck.power.mutable_attention import Plants


@dataclass(frozen=True)
class Bug:
    """A bug that ports have.

    plants: the steps of attention that it makes wrong (keys of `attention.STEPS`).
    meant: (design, mask) of the float32 row that is made to catch it.
    claim: whether a row claims to see it at a precision.
    """

    plants: Plants
    meant: tuple[str, str]
    claim: Claim
