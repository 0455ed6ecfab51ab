"""Reasons for which the kernel of any vendor refuses a call."""

from collections.abc import Sequence

from jax import lax

from jax_attn.attention.call import Call

_DEFAULT = (None, "default", lax.Precision.DEFAULT)


def refusals(call: Call, dtypes: Sequence[str], precision: str) -> list[str]:
    """Every reason why a kernel that takes these dtypes cannot serve the call.

    precision: what the kernel's products are computed in, whatever the call asks for.
    """
    dtype, dropout = str(call.query.dtype), call.dropout
    return holding(
        {
            "there is nothing to compute: the batch is empty": call.B == 0,
            f"it takes {' and '.join(dtypes)}, not {dtype}": dtype not in dtypes,
            f"it multiplies {precision}, whatever the precision": call.precision not in _DEFAULT,
            "it has no dropout that another kernel would draw alike": dropout and dropout.rate > 0,
        }
    )


def unknown_sizes(call: Call) -> list[str]:
    """The axes whose sizes are symbols; no other condition can be checked on such a call."""
    unknown = call.unknown_sizes("B", "T", "N", "H", "S", "K", "Hv")
    return [f"it needs known sizes, not {unknown}"] if unknown else []


def holding(reasons: dict[str, object]) -> list[str]:
    """The reasons whose condition holds."""
    return [reason for reason, holds in reasons.items() if holds]
