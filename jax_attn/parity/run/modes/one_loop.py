"""Roundings of long tensors in one loop over their numbers, which XLA compiles.

Torch takes a pass for each of a dozen steps, and these passes were more than half of a perturbed
run of a large model. The numbers are those of `rounding` but for float64's own roundoff: a compiled
loop may fuse a product and a sum.
"""

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from jax_attn.parity.run.modes.draws import GOLDEN, MIXED, SCALE

LENGTH = 2**18
"""Elements of each loop, so that there is one to compile."""


def _moved(x: Array, by: Array, key: Array, unused: Array) -> Array:
    """`DrawnRounding.moved`: x + by * (uniform in (-1, 1)), where that is finite."""
    bits = lax.bitcast_convert_type(x, jnp.uint64) + key
    bits = (bits >> unused) * GOLDEN
    bits = (bits ^ (bits >> jnp.uint64(32))) * MIXED
    drawn = lax.bitcast_convert_type(bits, jnp.int64).astype(jnp.float64) * SCALE
    moved = x + by * drawn
    return jnp.where(jnp.isfinite(moved), moved, x)


def _stored(x: Array, key: Array, unused: Array, store: Array, tiny: Array) -> Array:
    """`DrawnRounding.stored`: x as a precision stores it; 0 is kept."""
    by = jnp.maximum(jnp.abs(store * x), tiny)
    return _moved(x, jnp.where(x == 0, 0.0, by), key, unused)


def _summed(
    total: Array,
    squares: Array,
    of_total: Array,
    of_squares: Array,
    lost: Array,
    of_sum: Array,
    count_below: Array,
    *storing: Array,
) -> Array:
    """Sums moved by what they err by, and stored; those that count are exact, as `is_count` has it.

    storing: what `_stored` takes.
    """
    by = jnp.sqrt(of_squares * squares + of_total * total**2 + lost)
    moved = _stored(_moved(total, by, of_sum, storing[1]), *storing)
    are_whole = (total == jnp.rint(total)) & (squares == jnp.rint(squares))
    return jnp.where(are_whole & (squares < count_below), total, moved)


_STORED, _SUMMED = jax.jit(_stored), jax.jit(_summed)


@cache
def _has_cpu() -> bool:
    """Whether JAX may use the CPU, where torch's tensors lie."""
    try:
        return bool(jax.devices("cpu"))
    except RuntimeError:  # of JAX_PLATFORMS
        return False


def fits(*parts: torch.Tensor) -> bool:
    """Whether these parts of tensors are of a loop's length."""
    fit = all(x.numel() == LENGTH and x.dtype is torch.float64 and x.is_contiguous() for x in parts)
    return fit and _has_cpu()


def stored(x: torch.Tensor, *storing: np.uint64 | float) -> torch.Tensor:
    """x, which fits, as it is stored; storing: as `DrawnRounding.storing` gives it."""
    return _by_jax(_STORED, [x], *storing)


def summed(
    total: torch.Tensor,
    squares: torch.Tensor,
    bridge: tuple[float, float, float],
    of_sum: np.uint64,
    count_below: float,
    *storing: np.uint64 | float,
) -> torch.Tensor:
    """Sums, which fit, moved by what `bridge` says they err by, as they are stored.

    Those whose squares are below `count_below` may be counts, which do not err.
    """
    return _by_jax(_SUMMED, [total, squares], *bridge, of_sum, count_below, *storing)


def _by_jax(
    loop: Callable[..., Array], tensors: list[torch.Tensor], *numbers: np.uint64 | float
) -> torch.Tensor:
    """What a loop makes of tensors, without a copy in or out."""
    with jax.enable_x64(True):
        arrays = (jax.dlpack.from_dlpack(x.detach().view(-1)) for x in tensors)
        result = loop(*arrays, *map(np.asarray, numbers)).block_until_ready()
        return torch.from_dlpack(result).view(tensors[0].shape)
