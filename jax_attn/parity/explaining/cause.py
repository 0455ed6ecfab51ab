"""A possible cause of an error in a port, as it was tried in the reference."""

from dataclasses import dataclass

from jax_attn.parity.explaining.taps.tap import Tap


@dataclass(frozen=True)
class Cause:
    """A change of the reference that may be what the port does.

    Attributes:
      name: a name that begins with the field's word: "scale", "mask (polarity)", "epsilon".
      site: the operation of the reference that is changed.
      says: the change in words that follow "with".
      value: the number that was found, or its name; None if the cause has no number.
      confirmed: whether the changed reference computes the port's numbers, within rounding.
      explained: the share of the error that the change removes, from 0 to 1.
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
