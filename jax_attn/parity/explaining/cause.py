"""What may be wrong in a port, as it was tried in the reference."""

from dataclasses import dataclass

from jax_attn.parity.explaining.taps.tap import Tap


@dataclass(frozen=True)
class Cause:
    """What a port may do in place of what the reference does.

    Attributes:
      name: begins with the field's word: "scale", "mask (polarity)", "epsilon".
      site: where the reference does it.
      says: what the reference has then, to follow "with".
      value: the number that was found, or the name of one; None where there is none.
      confirmed: whether the reference then computes the port's numbers, within rounding.
      explained: the share of the error that is gone then, from 0 to 1.
    """

    name: str
    site: Tap
    says: str
    value: float | str | None
    confirmed: bool
    explained: float

    @property
    def sentence(self) -> str:
        """The finding in one sentence."""
        module, source, is_backward = self.site.place
        at = f" in `{module}`" if module else ""
        at = f" in the backward pass of{at.removeprefix(' in')}" if is_backward else at
        at += f" ({source})" if source else ""
        if self.confirmed:
            return f"The port computes what the reference would with {self.says}{at}."
        return (
            f"With {self.says}{at} the reference comes closer: "
            f"{min(self.explained, 0.99):.0%} of the error is gone."
        )
