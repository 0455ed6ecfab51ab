"""The kernels that the rows' ports insist on, and the tiles that each row uses."""

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

# Smaller than the axes of the small shapes, except a single token's, and dividing few of them:
# rows that insist on the blocked kernel have several tiles, and partial tiles at the edges.
SMALL_TILES = Tiles(K=1, T=3, S=4)


def tiled(blocked_kernel: Kernel, tiles: Tiles) -> Kernel:
    """Return the blocked kernel with these tiles in place of its shipped ones."""
    run: Callable[..., jax.Array] = blocked_kernel.run
    return replace(blocked_kernel, run=partial(run, tiles=tiles))


def kernel_of_rows(implementation: str | None, backend: str, shape: str) -> Kernel | None:
    """Return the kernel that rows of a shape on `backend` insist on; None lets the port choose.

    The blocked kernel has small tiles on small shapes, and its shipped tiles on the shapes made to
    cross their edges. Splash is interpreted on backends other than TPUs.
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
    """Return a kernel that only notes its tiles; for None, those of the chosen kernel."""

    def note(call: Call) -> jax.Array:
        runs = kernel or KERNELS[dispatch.explain(call, None).chosen or "dense"]
        calls.append(tiles_in_words(runs, call))
        return jnp.zeros((*call.query.shape[:3], call.value.shape[3]), call.query.dtype)

    # Like the chooser, dense refuses no call.
    return replace(kernel or KERNELS["dense"], run=note)


DENSE = "none: dense writes all scores out"


def is_dense(kernel: Kernel | None, size: Size) -> bool:
    """Return whether the port chooses dense whatever the call is, so that no trace is needed."""
    on_cpu = dispatch.home_platform() == "cpu"
    return kernel is None and on_cpu and size.T < blocked.FEW_QUERIES


def tiles_in_words(kernel: Kernel, call: Call) -> str:
    """Describe a kernel's tiles; for blocked, with their size: key/value heads × queries × keys."""
    if kernel.name == "dense":
        return DENSE
    if kernel.name != "blocked":
        return f"those of {kernel.name}"
    small = isinstance(kernel.run, partial)
    tiles = SMALL_TILES.within(call) if small else tile_sizes(call)
    whose = "small" if small else "shipped"
    return f"{whose}: {tiles.K} × {tiles.T} × {tiles.S} of {call.K} × {call.T} × {call.S}"
