"""Sharding of kernels whose loops XLA's partitioner cannot shard: each device runs its own part.

In a mesh of Auto axes XLA's partitioner decides how arrays are sharded. It would gather them before
a loop over tiles. A sharding rule and the program of one device prevent this
(`jax.experimental.custom_partitioning`). With one device, that program is the whole call. XLA for
TPUs accepts no such rule (jax#38196); there the loops are written so that it can shard them.
"""

import contextlib
import functools
import math
import string
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import core as jex
from jax.extend import source_info_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_attn.attention.call import Call
from jax_attn.attention.kernels.forward_mode import Floats
from jax_attn.attention.kernels.mesh.shards import OUTPUT, SUMS, WHOLE, Shards, letters
from jax_attn.attention.kernels.tile_loops import Outputs
from jax_attn.attention.meshes import MeshAxes, in_auto_mesh, within_shard_map

Program = Callable[..., list[jax.Array]]
"""A function of arrays that returns arrays."""
_OUTPUTS = (OUTPUT, SUMS, SUMS)


def outputs(run: Callable[[Call], Outputs], call: Call) -> Outputs:
    """Run `run(call)` sharded: an output (B, T, N, Hv) and two numbers per query, (B, N, T)."""

    def local(shards: Shards | None, call: Call) -> Outputs:
        return run(call if shards is None else shards.here(call))

    return _cut(local, call, (), _OUTPUTS)


def gradients(
    run: Callable[[Call, Outputs, Outputs], Floats], call: Call, out: Outputs, d_out: Outputs
) -> Floats:
    """Run `run(call, out, d_out)` sharded: a gradient for each of the call's floats, in any dtype.

    An array that several devices hold gets the sum of their gradients.
    """
    named = jax.tree.unflatten(jax.tree.structure(call), letters(call)).floats

    def local(shards: Shards | None, call: Call, out: Outputs, d_out: Outputs) -> Floats:
        if shards is None:
            return run(call, out, d_out)
        grads = run(shards.here(call), out, d_out)
        if shards.share_heads:
            # Gradients for all heads, 0 for those that this device does not read.
            (grads,) = jax.linear_transpose(shards.read, _of_all_heads(shards, grads, named))(grads)
        grads = {
            name: lax.psum(grad, lacking)
            if grad is not None and (lacking := shards.lacking(named[name]))
            else grad
            for name, grad in grads.items()
        }
        return shards.read(grads) if shards.own else grads

    return _cut(local, call, (out, d_out), named)


def _of_all_heads(shards: Shards, grads: Floats, named: Mapping[str, str]) -> dict[str, Any]:
    """Return the shapes of gradients of all key/value heads."""

    def shape(name: str, x: jax.Array) -> jax.ShapeDtypeStruct:
        sizes = (shards.K if a == "K" else n for a, n in zip(named[name], x.shape, strict=True))
        return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)

    return {name: None if x is None else shape(name, x) for name, x in grads.items()}


def _cut(local: Callable[..., Any], call: Call, rest: tuple[Outputs, ...], given: Any) -> Any:
    """Run `local(None, call, *rest)`, or `local(shards, …)` on each of several devices.

    On TPUs it is `local(shards, …)` for each batch row and head. given: the letters of the results,
    as a pytree.
    """
    # JAX's older partitioner, GSPMD, knows no sharding rules.
    if within_shard_map() or not getattr(jax.config, "jax_use_shardy_partitioner", True):
        return local(None, call, *rest)
    leaves, tree = jax.tree.flatten((call, *rest))
    kinds, settings = [jax.random.key_impl(x) if _is_key(x) else None for x in leaves], _settings()

    def program(shards: Shards | None) -> Program:
        def run(*plain: jax.Array) -> list[jax.Array]:
            pairs = zip(plain, kinds, strict=True)
            with settings():
                arrays = [
                    jax.random.wrap_key_data(x, impl=kind) if kind else x for x, kind in pairs
                ]
                return jax.tree.leaves(local(shards, *jax.tree.unflatten(tree, arrays)))

        return run

    plain = [jax.random.key_data(x) if kind else x for x, kind in zip(leaves, kinds, strict=True)]
    named = [*letters(call), *_OUTPUTS * len(rest)]
    named = [name.rjust(x.ndim, WHOLE) for name, x in zip(named, plain, strict=True)]
    results = jax.tree.leaves(given)
    run = _partitioned(program, call.N, call.K, named, results)
    if in_auto_mesh(call):
        on_tpu = _by_rows_and_heads(program, call.B, call.N, call.K, named, results)
        out = lax.platform_dependent(*plain, tpu=on_tpu, default=run)
    else:
        out = run(*plain)
    return jax.tree.unflatten(jax.tree.structure(given), out)


def _by_rows_and_heads(
    program: Callable[[Shards | None], Program],
    B: int,
    N: int,
    K: int,
    named: list[str],
    given: list[str],
) -> Program:
    """Return `program` vmapped over batch rows and key/value heads; no loop spans a sharded axis.

    XLA's partitioner shards its products, sums and loops along both. named, given: the letters of
    arguments and results.
    """
    parts = {"B": (B, 1), "N": (K, N // K), "K": (K, 1)}
    each = program(Shards({"B": ("row",), "N": ("head",), "K": ("head",)}, N, K))
    # The inner vmap first. It sees a batch of one, before the heads.
    for axis_name, wanted in (("head", "NK"), ("row", "B")):
        in_axes, out_axes = ([_axis(name, wanted) for name in names] for names in (named, given))
        each = jax.vmap(each, tuple(in_axes), out_axes, axis_name=axis_name)

    def split(name: str, x: jax.Array) -> jax.Array:
        pairs = zip(name, x.shape, strict=True)
        return x.reshape([n for letter, size in pairs for n in parts.get(letter, (size,))])

    def joined(name: str, x: jax.Array) -> jax.Array:
        shape = iter(x.shape)
        return x.reshape([next(shape) * (next(shape) if a in parts else 1) for a in name])

    def run(*arrays: jax.Array) -> list[jax.Array]:
        found = each(*map(split, named, arrays))
        return [joined(name, x) for name, x in zip(given, found, strict=True)]

    return run


def _axis(name: str, wanted: str) -> int | None:
    """Return the first axis whose letter in `name` is one of `wanted`, or None."""
    return next((axis for axis, letter in enumerate(name) if letter in wanted), None)


def _settings() -> Callable[[], contextlib.ExitStack]:
    """Capture this thread's JAX settings, to be entered in the compiler's thread."""
    config: Any = jax.config
    x64, precision = config.jax_enable_x64, config.jax_default_matmul_precision
    promotion = config.jax_numpy_dtype_promotion

    def settings() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(jax.enable_x64(x64))
        stack.enter_context(jax.default_matmul_precision(precision))
        stack.enter_context(jax.numpy_dtype_promotion(promotion))
        return stack

    return settings


def _is_key(x: jax.Array) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _partitioned(
    program: Callable[[Shards | None], Program],
    N: int,
    K: int,
    named: list[str],
    given: list[str],
) -> Program:
    """Return `program(None)`, or on each of several devices `program(shards)`; also under vmap.

    N, K: query and key/value heads. named, given: the letters of arguments and results.
    """

    def partition(mesh: Mesh, arrays: Sequence, results: Sequence) -> tuple:
        shards = Shards.of(N, K, mesh.shape, named, [_cut_by(mesh, x) for x in arrays])
        pairs = [*zip(named, arrays, strict=True), *zip(given, results, strict=True)]
        with_heads = [(name, x) for name, x in pairs if "K" in name]
        if shards.share_heads and all(_has_own(mesh, shards, *pair) for pair in with_heads):
            shards = replace(shards, own=True)

        def at(name: str, x: jax.ShapeDtypeStruct) -> Any:
            is_own = shards.own and "K" in name
            return x.sharding if is_own else NamedSharding(mesh, shards.spec(name))

        placed = [at(*pair) for pair in pairs]
        here = _without_frames(program(shards))
        return mesh, here, placed[len(named) :], tuple(placed[: len(named)])

    whole = custom_partitioning(program(None))
    # No decoding: JAX cannot decode a sharding along a part of a mesh axis.
    whole.def_partition(partition, decode_shardings=False, **_rule(N, K, named, given))
    run = custom_vmap(whole)

    @run.def_vmap
    def _(_: int, are_mapped: Sequence[bool], *arrays: jax.Array) -> tuple[list, list[bool]]:
        at = [0 if is_mapped else None for is_mapped in are_mapped]
        letter = next(a for a in string.ascii_lowercase if not any(a in name for name in given))
        pairs = zip(named, are_mapped, strict=True)
        more = [letter + name if is_mapped else name for name, is_mapped in pairs]

        def mapped(shards: Shards | None) -> Program:
            return jax.vmap(program(shards), in_axes=at)

        out = _partitioned(mapped, N, K, more, [letter + name for name in given])(*arrays)
        return out, [True] * len(out)

    return run


def _without_frames(program: Program) -> Program:
    """Return the program without its operations' Python source lines.

    XLA inlines the result of `partition` into the whole program, and looks up its stack frames in
    that program's table. There they may form a cycle, in which XLA of jaxlib 0.10.2 loops forever.
    """

    def without(x: Any) -> Any:
        if isinstance(x, jex.Jaxpr):  # from jax 0.12 on also a closed one
            return x.replace(eqns=list(map(of_equation, x.eqns)))
        if isinstance(x, jex.ClosedJaxpr):
            return x.replace(jaxpr=without(x.jaxpr))
        return tuple(map(without, x)) if type(x) is tuple else x

    def of_equation(equation: jex.JaxprEqn) -> jex.JaxprEqn:
        params = {name: without(x) for name, x in equation.params.items()}
        source = source_info_util.SourceInfo(_nowhere(), equation.source_info.name_stack)
        return equation.replace(params=params, source_info=source)

    def run(*arrays: jax.Array) -> list[jax.Array]:
        return jex.jaxpr_as_fun(without(jax.make_jaxpr(program)(*arrays)))(*arrays)

    return run


@functools.cache
def _nowhere() -> Any:
    """Return a traceback through only Python's and JAX's own files, which JAX leaves out."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(source_info_util.current).result().traceback


def _has_own(mesh: Mesh, shards: Shards, name: str, x: jax.ShapeDtypeStruct) -> bool:
    """Return whether each device holds exactly the key/value head that its query heads read.

    name: the letters of the array's axes.
    """
    heads = name.index("K")
    count = math.prod(mesh.shape[name] for name in shards.axes["N"])
    if count % shards.K:
        return False
    # The sharding of `count` query heads; several devices hold the same head.
    like = (*x.shape[:heads], count, *x.shape[heads + 1 :])
    cut = NamedSharding(mesh, shards.spec(name.replace("K", "N"))).devices_indices_map(like)
    if (found := _parts(x.sharding, x.shape)) is None:
        return False

    def own(wanted: tuple[slice, ...], got: tuple[slice, ...]) -> bool:
        first = (wanted[heads].start or 0) * shards.K // count
        ends = got[heads].indices(shards.K)[:2]
        rest = wanted[:heads] + wanted[heads + 1 :], got[:heads] + got[heads + 1 :]
        return ends == (first, first + 1) and rest[0] == rest[1]

    return all(own(cut[device], found[device]) for device in mesh.devices.flat)


def _cut_by(mesh: Mesh, x: jax.ShapeDtypeStruct) -> list[MeshAxes]:
    """Return, for each axis of an array, the mesh axes along which it is sharded.

    Sharding along a part of a mesh axis, or into parts of unequal sizes, is ignored.
    """

    def firsts(slices: Mapping[Any, tuple[slice, ...]], shape: tuple[int, ...]) -> np.ndarray:
        """Return where each device's part begins, (*mesh, axes of the array)."""
        begun = [[at.start or 0 for at in slices[device]] for device in mesh.devices.flat]
        return np.array(begun).reshape(*mesh.devices.shape, len(shape))

    def of(size: int, at: np.ndarray) -> MeshAxes:
        """Return the mesh axes that shard an array axis; at: where each device's part begins."""
        steps = {name: at.take(-1, i).flat[0] for i, name in enumerate(mesh.axis_names)}
        names = tuple(sorted((name for name in steps if steps[name]), key=lambda n: -steps[n]))
        if size % math.prod(mesh.shape[name] for name in names):
            return ()
        sharding = NamedSharding(mesh, PartitionSpec(names))
        by_names = firsts(sharding.devices_indices_map((size,)), (size,))
        return names if (by_names[..., 0] == at).all() else ()

    if (parts := _parts(x.sharding, x.shape)) is None:
        return [()] * x.ndim
    at = firsts(parts, x.shape)
    return [of(size, at[..., axis]) for axis, size in enumerate(x.shape)]


def _parts(sharding: Any, shape: tuple[int, ...]) -> Mapping[Any, tuple[slice, ...]] | None:
    """Return the part of an array on each device; None if the parts have unequal sizes."""
    try:
        return sharding.devices_indices_map(shape)
    except ValueError:
        return None


def _rule(N: int, K: int, named: list[str], given: list[str]) -> dict[str, Any]:
    """Return Shardy's rule for `def_partition`: which axes of operands and results are the same.

    Query heads are the key/value heads times the query heads that share one.
    """
    whole: list[str] = []
    heads = "K" if N == K else "G" if K == 1 else "(K G)"

    def factors(array: str) -> str:
        def factor(letter: str) -> str:
            if letter == WHOLE:
                whole.append(f"w{len(whole)}")
            return {WHOLE: whole[-1] if whole else "", "N": heads}.get(letter, letter)

        return " ".join(map(factor, array))

    operands, results = (", ".join(map(factors, x)) for x in (named, given))
    sizes = {"G": N // K} if "(K G)" in operands else {}
    return {
        "sharding_rule": f"{operands} -> {results}",
        "need_replication_factors": tuple(whole),
        **sizes,
    }
