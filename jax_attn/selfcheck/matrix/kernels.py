"""The kernels that the rows' ports insist on, and the tiles that each row ran in."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jax_attn.attention import dispatch
from jax_attn.attention.call import Call
from jax_attn.attention.dispatch import KERNELS, Kernel
from jax_attn.attention.kernels import blocked
from jax_attn.attention.kernels.tile import Tiles
from jax_attn.attention.kernels.tile_sizes import tile_sizes
from jax_attn.selfcheck.matrix.cases import TILE_EDGES, Size

# Smaller than the axes of the small shapes, but for a single token's, and dividing few of them:
# rows insisting on the blocked kernel have several tiles, and partial ones at the edges.
SMALL_TILES = Tiles(K=1, T=3, S=4)


def tiled(blocked_kernel: Kernel, tiles: Tiles) -> Kernel:
    """The blocked kernel in these tiles, in place of those that it is shipped with."""
    run: Callable[..., jax.Array] = blocked_kernel.run
    return replace(blocked_kernel, run=partial(run, tiles=tiles))


def kernel_of_rows(implementation: str | None, backend: str, shape: str) -> Kernel | None:
    """The kernel that rows of a shape on `backend` insist on; None lets the port choose.

    Blocked works in small tiles on small shapes, and as shipped on those that are made to cross the
    edges of its own tiles. Splash is interpreted away from TPUs.
    """
    if implementation is None:
        return None
    kernel = KERNELS[implementation]
    if implementation == "blocked" and shape not in TILE_EDGES:
        return tiled(kernel, SMALL_TILES)
    if implementation == "splash" and backend != "tpu":
        run: Callable[..., jax.Array] = kernel.run
        return replace(kernel, run=partial(run, interpret=True), only_on=None)
    return kernel


def recording(kernel: Kernel | None, calls: list[str]) -> Kernel:
    """The kernel, or whichever is chosen for a call, that notes its tiles and computes nothing."""

    def note(call: Call) -> jax.Array:
        runs = kernel or KERNELS[dispatch.explain(call, None).chosen or "dense"]
        calls.append(tiles_in_words(runs, call))
        return jnp.zeros((*call.query.shape[:3], call.value.shape[3]), call.query.dtype)

    # Dense refuses no call, as the chooser does not.
    return replace(kernel or KERNELS["dense"], run=note)


DENSE = "none: dense writes all scores out"


def is_dense(kernel: Kernel | None, size: Size) -> bool:
    """Whether the port chooses dense whatever else the call holds, so that no trace is needed."""
    on_cpu = dispatch.home_platform() == "cpu"
    return kernel is None and on_cpu and size.T < blocked.FEW_QUERIES


def tiles_in_words(kernel: Kernel, call: Call) -> str:
    """Whose tiles, and for the blocked kernel how large: key/value heads × queries × keys."""
    if kernel.name == "dense":
        return DENSE
    if kernel.name != "blocked":
        return f"those of {kernel.name}"
    small = isinstance(kernel.run, partial)
    tiles = SMALL_TILES.within(call) if small else tile_sizes(call)
    whose = "small" if small else "shipped"
    return f"{whose}: {tiles.K} × {tiles.T} × {tiles.S} of {call.K} × {call.T} × {call.S}"
