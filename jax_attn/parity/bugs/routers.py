"""Bugs of the weights that a router gives to experts."""

from collections.abc import Iterator

from torch import Tensor

from jax_attn.parity.bugs.bug import Bug, OperatorCall

_NEAR = 1e-6


def unnormalized(call: OperatorCall) -> Iterator[Bug]:
    """Yield rows that are not divided by their sum."""
    x, by = call.args[:2]
    if isinstance(x, Tensor) and isinstance(by, Tensor) and by.shape == (*x.shape[:-1], 1):
        total = x.sum(-1, keepdim=True)
        if bool(((by - total).abs() <= _NEAR * total.abs()).all()):
            says = "weights that are not divided by their sum"
            yield Bug("router (not normalized)", says, lambda call: call.args[0].clone())


def normalized(call: OperatorCall) -> Iterator[Bug]:
    """Yield the weights of the chosen experts divided by their sum."""
    says = "the chosen weights divided by their sum"
    yield Bug("router (normalized)", says, _divided)


def _divided(call: OperatorCall) -> tuple[Tensor, Tensor]:
    weights, chosen = call.result()
    return weights / weights.sum(-1, keepdim=True), chosen
