"""Attention in a mesh of Explicit axes, where arrays' types state their sharding.

JAX refuses to slice along a sharded axis there. So each device runs the function on its own part
(`shards`) inside `jax.shard_map`, from which JAX derives the communication of the gradients.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jax_attn.attention import checks, meshes
from jax_attn.attention.call import Call
from jax_attn.attention.kernels.mesh.shards import Shards, letters, letters_of_cache
from jax_attn.attention.kv_cache import KVCache
from jax_attn.attention.meshes import cuts, explicit_mesh, placed, within_shard_map

_NEVER_BROADCAST = ("query", "key", "value")


def is_cut(*arrays: Call | KVCache) -> bool:
    """Return whether a function of these arrays must run inside `on_each_device`.

    Inside a shard_map whose mesh still has Explicit axes, only if they shard the arrays: a vmap
    over a mesh axis leaves that axis to the mesh.
    """
    if explicit_mesh(arrays) is None:
        return False
    return not within_shard_map() or any(any(cuts(x)) for x in jax.tree.leaves(arrays))


# Compiled, because an eager shard_map runs operation by operation.
@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="check_vma", inline=True)
def on_each_device(
    run: Callable[..., Any], given: Any, call: Call, *caches: KVCache, check_vma: bool = True
) -> Any:
    """Run `run(call)`, or `run(shards, call, *caches)` if there are any, on each device's parts.

    given: the letters of the results, as a pytree. Results are sharded along batch and heads like
    the first array that is sharded along them, and whole along the length: an axis that attention
    cannot be sharded along is gathered first. check_vma: as in `jax.shard_map`; if False, `run`
    must not communicate. Raises ArgumentError if the mesh also has Auto axes, or another mesh is
    set.
    """
    mesh = explicit_mesh((call, caches))
    assert mesh is not None
    checks.raise_all("attention in a mesh", meshes.problems(mesh))
    arrays, tree = jax.tree.flatten((call, *caches))
    named = [*letters(call), *(name for cache in caches for name in letters_of_cache(cache))]
    shards = Shards.of(call.N, call.K, mesh.shape, named, [cuts(x) for x in arrays])
    specs = tuple(shards.spec(name) for name in named)

    of_floats = jax.tree.unflatten(jax.tree.structure(call), letters(call)).floats

    def varying(name: str, x: jax.Array | None) -> jax.Array | None:
        """Mark x varying, so that its gradient is summed in x's own shape, before broadcasting."""
        axes = () if x is None or name in _NEVER_BROADCAST else shards.lacking(of_floats[name])
        return lax.pcast(x, axes, to="varying") if axes else x

    def here(*arrays: jax.Array) -> jax.Array:
        call, *caches = jax.tree.unflatten(tree, arrays)
        if check_vma:
            call = call.with_floats({name: varying(name, x) for name, x in call.floats.items()})
        return run(shards, call, *caches) if caches else run(shards.here(call))

    # None names all axes but those that a vmap is over.
    left = {*mesh.axis_names} - {*mesh.manual_axes} if mesh.manual_axes else set()
    out_specs = jax.tree.map(shards.spec, given)
    how: Any = {"axis_names": left, "check_vma": check_vma}
    over = jax.shard_map(here, mesh=mesh, in_specs=specs, out_specs=out_specs, **how)
    return over(*(placed(x, mesh, at) for x, at in zip(arrays, specs, strict=True)))
