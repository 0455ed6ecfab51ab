"""Attention in a mesh of Explicit axes, where arrays' types say how they lie on it.

There a slice along an axis that is cut is refused, so that the kernels are run by a
`jax.shard_map`, each device on its own part (`shards`); JAX derives from it what the gradients
need.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType

from jax_attn.attention import checks
from jax_attn.attention.call import Call
from jax_attn.attention.kernels.mesh.shards import OUTPUT, Shards, letters
from jax_attn.attention.meshes import cuts, explicit_mesh, placed

Run = Callable[[Call, Any], jax.Array]
"""(call, implementation) → (B, T, N, Hv)."""


# Compiled, because eagerly a shard_map is run operation by operation.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def attention(run: Run, implementation: Any, call: Call) -> jax.Array:
    """`run(call, implementation)` on each device's part; (B, T, N, Hv), cut as the query is.

    An axis that attention is not cut along, as the length, is gathered first. Raises ArgumentError
    where the mesh has axes of other kinds, too.
    """
    mesh = explicit_mesh(call)
    assert mesh is not None
    if any(kind != AxisType.Explicit for kind in mesh.axis_types):
        text = f"mesh: expected axes that are all Explicit, or all Auto, got {mesh}"
        checks.raise_all("attention in a mesh", [text])
    arrays, tree = jax.tree.flatten(call)
    named = letters(call)
    shards = Shards.of(call, mesh.shape, named, [cuts(x) for x in arrays])
    specs = tuple(shards.spec(name) for name in named)

    def here(*arrays: jax.Array) -> jax.Array:
        return run(shards.here(jax.tree.unflatten(tree, arrays)), implementation)

    over = jax.shard_map(here, mesh=mesh, in_specs=specs, out_specs=shards.spec(OUTPUT))
    return over(*(placed(x, mesh, at) for x, at in zip(arrays, specs, strict=True)))
