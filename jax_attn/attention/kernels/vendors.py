"""Reasons for which any vendor's kernel refuses a call."""

from collections.abc import Sequence

from jax import lax

from jax_attn.attention import checks
from jax_attn.attention.call import Call

_DEFAULT = (None, "default", lax.Precision.DEFAULT)


def refusals(call: Call, dtypes: Sequence[str], precision: str) -> list[str]:
    """List every reason why a kernel for these dtypes cannot serve the call.

    precision: how the kernel computes its products, whatever precision the call asks for.
    """
    dtype, dropout = str(call.query.dtype), call.dropout
    return checks.holding(
        {
            "there is nothing to compute: the batch is empty": call.B == 0,
            f"it takes {' and '.join(dtypes)}, not {dtype}": dtype not in dtypes,
            f"it multiplies {precision}, whatever the precision": call.precision not in _DEFAULT,
            "its dropout differs from that of other kernels": dropout and dropout.rate > 0,
        }
    )


def unknown_sizes(call: Call) -> list[str]:
    """Name the axes with symbolic sizes; such a call allows no other check."""
    unknown = call.unknown_sizes("B", "T", "N", "H", "S", "K", "Hv")
    return [f"it needs known sizes, not {unknown}"] if unknown else []
