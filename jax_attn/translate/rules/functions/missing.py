"""What a partial translation calls in the place of an operator without a rule."""

from jax import Array


def not_translated(operator: str, place: str, /, **arguments: object) -> Array:
    """Raise NotImplementedError; write what this operator of torch computes in place of the call.

    place: its line in torch's source. arguments: those of the operator, by torch's names.
    """
    raise NotImplementedError(f"{operator} has no translation, {place}")
