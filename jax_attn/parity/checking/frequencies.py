"""Frequencies of positions held in a narrow dtype, whose angles are wrong far from the start.

`model.bfloat16()` converts buffers as well, such as the `inv_freq` of rotary positions. The error
of an angle grows with its position, so that short inputs do not show it.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_attn.parity.judge.finding import StandingNote
from jax_attn.transfer import as_numpy

if TYPE_CHECKING:
    from jax_attn.parity.checking.prepared import Prepared

_SIGNIFICAND = {"bfloat16": 8, "float16": 11}
"""Narrow dtype -> bits of its significand."""
_FEWEST = 4
"""The fewest frequencies that are told from other numbers."""
_LENGTHS = ("max_position_embeddings", "max_seq_len_cached", "max_seq_len", "n_positions")
"""Attributes of modules and their configs that give the number of positions."""
_USUAL = 4096
"""The number of positions for which the error is given if no module gives one."""


def of_reference(prepared: "Prepared") -> tuple[tuple[StandingNote, ...], int]:
    """Return notes on the reference's frequencies, and the number of positions that it allows."""
    module = prepared.reference.module
    length = max(map(_length, module.modules()), default=0) or _USUAL
    held = {name: as_numpy(x) for name, x in module.named_buffers() if x.is_floating_point()}
    return tuple(rounded(held, "buffer", "reference", length)), length


def _length(module: Any) -> int:
    """Return the number of positions that a module gives, by itself or in its config; 0 if none."""
    sources = (module, getattr(module, "config", None))
    values = (getattr(source, name, None) for source in sources for name in _LENGTHS)
    return max((v for v in values if isinstance(v, int) and not isinstance(v, bool)), default=0)


def rounded(arrays: Mapping[str, Any], what: str, side: str, length: int) -> Iterator[StandingNote]:
    """Yield a note on each array of frequencies in a narrow dtype, with the error of its angles.

    arrays: of NumPy or JAX; only frequencies are read. what: the arrays in words, such as "buffer".
    length: the number of positions.
    """
    for name, a in arrays.items():
        if (error := _error(name, a)) is None:
            continue
        yield StandingNote(
            "narrow-frequencies",
            f"{what} `{name}` of the {side} holds frequencies of positions in {a.dtype.name}: the "
            f"angle at position {length - 1:,} is off by up to {(length - 1) * error:.2g} radians, "
            f"and a check of shorter inputs does not show it; keep frequencies in float32, also in "
            f"a model that computes in {a.dtype.name}",
        )


def _error(name: str, a: Any) -> float | None:
    """Return the largest rounding error of narrow frequencies; None for other arrays.

    Frequencies are positive and decrease, and their name says so, or they begin with 1 and decrease
    by one factor. Powers of 2 are held exactly.
    """
    bits = _SIGNIFICAND.get(a.dtype.name)
    if bits is None or a.size < _FEWEST or a.size != max(a.shape):
        return None
    values = np.asarray(a).astype(np.float64).reshape(-1)
    if not (np.isfinite(values).all() and (values > 0).all() and (np.diff(values) < 0).all()):
        return None
    steps = np.diff(np.log(values))
    is_geometric = values[0] == 1 and np.ptp(steps) <= 4 * 2.0**-bits
    if values[0] > 1 or not (is_geometric or "freq" in name.rpartition(".")[2].lower()):
        return None
    fractions, exponents = np.frexp(values)
    errors = np.where(fractions == 0.5, 0.0, np.ldexp(2.0 ** (-bits - 1), exponents))  # half a unit
    return float(errors.max()) or None
