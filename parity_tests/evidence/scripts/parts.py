"""What the blocked kernel's time is spent on: the same tiles with less and less in them.

    python parity_tests/evidence/scripts/parts.py

times, in interleaved rounds, the whole kernel forward, then its loops with only the products and
the exponentials, then with the products alone: 1 × 8 heads × 2048 × 64, float32, on as many
threads as there are cores. Asks the compiler for the temporaries at 32,768. Writes
profile/blocked.json.
"""

import statistics
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from measuring import in_turn, keep, seconds

from jax_attn.attention.call import Call, checked_call
from jax_attn.attention.kernels import blocked
from jax_attn.attention.kernels.tile import Tile
from jax_attn.attention.kernels.tile_sizes import tile_sizes

B, L, N, H = 1, 2048, 8, 64
LONGEST = 32768
ROUNDS = 41


def loops(call: Call, weights: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The kernel's tiles and products, `weights` in the place of its softmax."""
    sizes = tile_sizes(call)

    def row(n: jax.Array, out: jax.Array) -> jax.Array:
        row = Tile.row(call, sizes, n)
        q_KRH = row.queries(call.query)

        def column(j: jax.Array, out_KRH: jax.Array) -> jax.Array:
            tile = row.column(j)
            k_KSH, v_KSH = tile.keys(call.key), tile.keys(call.value)
            scores_KRS = jnp.einsum("KRH,KSH->KRS", q_KRH, k_KSH)
            return out_KRH + jnp.einsum("KRS,KSH->KRH", weights(scores_KRS), v_KSH)

        columns = call.S // sizes.S
        return row.put_queries(out, lax.fori_loop(0, columns, column, jnp.zeros_like(q_KRH)))

    rows = sizes.groups(call) * sizes.rows(call)
    return lax.fori_loop(0, rows, row, jnp.zeros_like(call.query))


PARTS = {
    "whole": blocked.attention,
    "products and exponentials": lambda call: loops(call, jnp.exp),
    "products": lambda call: loops(call, lambda scores: scores),
}


def attend(part: str, *arrays: jax.Array) -> jax.Array:
    call = checked_call("parts", *arrays)
    return PARTS[part](call)


def temporaries() -> dict[str, int]:
    """mode → bytes, of the whole kernel at LONGEST."""
    whole = partial(attend, "whole")

    def both(d_out: jax.Array, *arrays: jax.Array) -> tuple:
        out, pull = jax.vjp(whole, *arrays)
        return out, pull(d_out)

    x = jax.ShapeDtypeStruct((B, LONGEST, N, H), jnp.float32)
    modes = {"forward": (whole, (x,) * 3), "forward+backward": (both, (x,) * 4)}
    return {
        mode: jax.jit(fn).lower(*arrays).compile().memory_analysis().temp_size_in_bytes
        for mode, (fn, arrays) in modes.items()
    }


def milliseconds() -> dict[str, float]:
    """part → the median of a call."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((B, L, N, H), np.float32)) for _ in range(3)]
    jitted = {part: jax.jit(partial(attend, part)) for part in PARTS}

    def timed(part: str) -> float:
        return seconds(lambda: jax.block_until_ready(jitted[part](*arrays)))

    taken = in_turn({part: partial(timed, part) for part in PARTS}, ROUNDS)
    return {part: 1e3 * statistics.median(times) for part, times in taken.items()}


if __name__ == "__main__":
    print(keep("blocked", {"milliseconds": milliseconds(), "temporaries": temporaries()}))
