"""What sharding costs on eight CPU devices that share the machine's cores.

    python parity_tests/evidence/scripts/sharding.py

times causal attention, forward and with its gradients, in a mesh of Auto axes, and on one device.
The work is the same and so are the cores, so that what a split costs shows in its time over that on
one device. The implementations take turns in one process. Writes profile/sharding.json: medians in
milliseconds, how many times as long as on one device, and what the compiled program sends.
"""

import functools
import os
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from measuring import in_turn, keep, seconds

from jax_attn import dot_product_attention
from jax_attn.parity.run.traffic import sent, total

B, T, N, H = 8, 512, 8, 64
ROUNDS = 5
# name -> the sizes of the mesh, of whose axes `data` cuts the batch and `heads` the heads
MESHES = {
    "one device": (1, 1),
    "data=8": (8, 1),
    "heads=8": (1, 8),
    "data=2, heads=4": (2, 4),
}
# name -> the number of key/value heads
HEADS = {"multi-head": N, "two key/value heads": 2}


def flax_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return nnx.dot_product_attention(q, k, v, mask=jnp.tril(jnp.ones((T, T), bool)))


IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "jax-attn": functools.partial(dot_product_attention, is_causal=True),
    "jax.nn": functools.partial(jax.nn.dot_product_attention, is_causal=True),
    "flax nnx": flax_attention,
}


def forward(attend: Callable[..., jax.Array], *qkv: jax.Array) -> Any:
    return attend(*qkv)


def backward(attend: Callable[..., jax.Array], *qkv: jax.Array) -> Any:
    def loss(*qkv: jax.Array) -> jax.Array:
        return attend(*qkv).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(*qkv)


PASSES = {"forward": forward, "forward+backward": backward}


def operands(mesh: jax.sharding.Mesh, K: int) -> list[jax.Array]:
    """Queries, keys and values. Keys and values lie whole where the heads do not divide."""
    rng = np.random.default_rng(0)
    of_keys = "heads" if K % mesh.shape["heads"] == 0 else None
    return [
        jax.device_put(
            rng.standard_normal((B, T, heads, H), np.float32),
            NamedSharding(mesh, P("data", None, axis)),
        )
        for heads, axis in ((N, "heads"), (K, of_keys), (K, of_keys))
    ]


def program(name: str, which: str, sizes: tuple[int, int], K: int) -> tuple[Any, list[jax.Array]]:
    """The compiled program, and what it is called with."""
    mesh = jax.make_mesh(
        sizes, ("data", "heads"), (AxisType.Auto,) * 2, devices=jax.devices()[: np.prod(sizes)]
    )
    given = operands(mesh, K)
    run = functools.partial(PASSES[which], IMPLEMENTATIONS[name])
    # Gradients lie as their arrays do, as an optimiser has them.
    lies = given[0].sharding if which == "forward" else tuple(x.sharding for x in given)
    return jax.jit(run, out_shardings=lies).lower(*given).compile(), given


def measured() -> list[dict[str, Any]]:
    """A row for each number of key/value heads, pass, mesh and implementation."""
    rows = []
    for heads, K in HEADS.items():
        for which in PASSES:
            programs = {
                (mesh, name): program(name, which, sizes, K)
                for mesh, sizes in MESHES.items()
                for name in IMPLEMENTATIONS
                if not (name == "flax nnx" and K != N)  # which repeats no heads
            }
            calls = {key: timed(*one) for key, one in programs.items()}
            times = in_turn(calls, ROUNDS)
            for (mesh, name), taken in times.items():
                alone = times["one device", name]
                ratio = statistics.median(a / b for a, b in zip(taken, alone, strict=True))
                operations = sent(programs[mesh, name][0].as_text())
                rows.append(
                    {
                        "heads": heads,
                        "pass": which,
                        "mesh": mesh,
                        "implementation": name,
                        "milliseconds": 1e3 * statistics.median(taken),
                        "over one device": ratio,
                        "sent": dict(Counter(each.kind for each in operations)),
                        "bytes": total(operations),
                    }
                )
    return rows


def timed(run: Any, given: list[jax.Array]) -> Callable[[], float]:
    return lambda: seconds(lambda: jax.block_until_ready(run(*given)))


if __name__ == "__main__":
    print(keep("sharding", {"rows": measured()}))
