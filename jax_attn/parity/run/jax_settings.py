"""Settings of JAX and of the kernels that hold while a port runs; each is put back afterwards."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax

from jax_attn.attention import dispatch
from jax_attn.attention.call import Call
from jax_attn.attention.kernels import blocked
from jax_attn.attention.kernels.tile import Sizes
from jax_attn.nn import cache


@contextlib.contextmanager
def x64_for(dtype: str) -> Iterator[None]:
    """JAX's x64 mode where `dtype` needs it, and only there."""
    with jax.enable_x64(dtype == "float64"):
        yield


# Smaller than the axes of the matrix, but for a single token's, and dividing few of them: rows
# have several tiles, and tiles at the edges.
_TILE, _PAGE = {"T": 3, "S": 4}, 5


@contextlib.contextmanager
def several_tiles() -> Iterator[None]:
    """The blocked kernel in tiles, and caches in pages, so small that rows have more than one.

    Several tokens a cache then writes by the page.
    """

    def small(call: Call) -> Sizes:
        return Sizes(1, min(call.T, _TILE["T"]), min(call.S, _TILE["S"]))

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (blocked, "tile_sizes", small),
            (cache, "FIRST_PAGE", _PAGE),
            (cache, "FEW_TOKENS", 1),
            (cache, "QUERY_TILE", 2),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Splash, by Pallas's interpreter, on any platform."""
    kernel = dispatch.KERNELS["splash"]
    run = partial(kernel.run, interpret=True)
    dispatch.KERNELS["splash"] = replace(kernel, run=run, only_on=None)
    try:
        yield
    finally:
        dispatch.KERNELS["splash"] = kernel
