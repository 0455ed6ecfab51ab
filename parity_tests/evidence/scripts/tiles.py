"""Whether other tiles than the shipped ones would be faster, by dtype, head dimension and length.

    python parity_tests/evidence/scripts/tiles.py

times a forward and backward pass of the blocked kernel, in interleaved rounds, in the tiles of
`tile_sizes.py` and in tiles of half and of twice their rows, queries and keys: 8 heads, with and
without a causal band, on as many threads as there are cores. Writes profile/tiles.json, from which
the table in docs/reference/speed.md is made. What this shows is where the numbers in
`tile_sizes.py` come from: run it on a machine with other caches before changing them.
"""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from measuring import in_turn, keep, seconds

from jax_attn.attention.call import checked_call
from jax_attn.attention.kernels import blocked
from jax_attn.attention.kernels.tile_sizes import Most, sized, table_row

ROUNDS = 5


class Workload(NamedTuple):
    """One row of batch, 8 heads."""

    dtype: str
    H: int
    L: int
    is_causal: bool


SHAPES = (
    ("float32", 64, 512),
    ("float32", 64, 2048),
    ("float32", 64, 4096),
    ("float32", 32, 2048),
    ("float32", 128, 2048),
    ("float32", 256, 2048),
    ("float64", 64, 2048),
    ("bfloat16", 64, 2048),
)
WORKLOADS = tuple(Workload(*shape, is_causal) for shape in SHAPES for is_causal in (False, True))


def candidates(shipped: Most) -> dict[str, Most]:
    """The shipped limits, and those of half and of twice each of them."""
    found = {"shipped": shipped}
    for name, factor in ((name, f) for name in Most._fields for f in (0.5, 2)):
        words = f"{'half' if factor < 1 else 'twice'} the {name}"
        found[words] = shipped._replace(**{name: int(getattr(shipped, name) * factor)})
    return found


def passes(workload: Workload) -> dict[str, Callable[[], float]]:
    """candidate → the seconds of a forward and backward pass; tiles that come out alike once."""
    w, rng = workload, np.random.default_rng(0)
    shape = (1, w.L, 8, w.H)
    arrays = [jnp.asarray(rng.standard_normal(shape), w.dtype) for _ in range(4)]
    call = partial(checked_call, "tiles", is_causal=w.is_causal)
    shipped = table_row(call(*arrays[:3]))
    sizes = {name: sized(call(*arrays[:3]), most) for name, most in candidates(shipped).items()}
    distinct = {tiles: name for name, tiles in reversed(sizes.items())}

    def both(tiles, *arrays):
        *qkv, d_out = arrays
        out, pull = jax.vjp(lambda *qkv: blocked.attention(call(*qkv), tiles), *qkv)
        return out, pull(d_out)

    def timed(run: Callable) -> float:
        return seconds(lambda: jax.block_until_ready(run(*arrays)))

    return {name: partial(timed, jax.jit(partial(both, tiles))) for tiles, name in distinct.items()}


def compared(workload: Workload) -> dict[str, float]:
    """candidate → the median of its seconds over the shipped tiles', within a round."""
    with jax.enable_x64(workload.dtype == "float64"):
        taken = in_turn(passes(workload), ROUNDS)
    shipped = taken["shipped"]
    return {
        name: statistics.median(a / b for a, b in zip(times, shipped, strict=True))
        for name, times in taken.items()
        if name != "shipped"
    } | {"milliseconds": 1e3 * statistics.median(shipped)}


def caches() -> dict[str, str]:
    """The size of each level that the first core sees, as Linux tells it; nothing elsewhere."""
    levels = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    read = [
        {n: (level / n).read_text().strip() for n in ("level", "type", "size")} for level in levels
    ]
    return {f"L{x['level']} {x['type'].lower()}": x["size"] for x in read}


if __name__ == "__main__":
    rows = [workload._asdict() | {"over shipped": compared(workload)} for workload in WORKLOADS]
    print(keep("tiles", {"caches": caches(), "rounds": ROUNDS, "rows": rows}))
