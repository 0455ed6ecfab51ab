"""Compile for other devices, on a host that has none of them.

`compile_for_tpu` runs the real TPU compiler (libtpu) without a TPU: it proves that a function
compiles and reports its cost; nothing is run, so it does not prove that any number is right.
`lower_everywhere` stops at the portable form (StableHLO) that each device's compiler takes.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import jax.export
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from jax_attn.parity.run.traffic import sent

INSTALL = "pip install 'jax-attn[tpu]'"

# libtpu reads these once, when it is loaded. Without the first, a second process on the host
# that loads it fails on a lock file; without the others it complains on stderr that it cannot
# tell which TPU it is on. They do not choose the target; the topology does.
LIBTPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def why_no_tpu_compiler() -> str | None:
    """Return why `compile_for_tpu` cannot work, with the command that mends it; None if it can."""
    if importlib.util.find_spec("libtpu") is None:
        return f"the TPU compiler, libtpu, is not installed: {INSTALL}"
    try:
        _device("v5e:2x2")
    except Exception as error:
        first_line = str(error).strip().split("\n")[0]
        return f"the TPU compiler, libtpu, is installed but does not load: {first_line}"
    return None


def compile_for_tpu(fn: Callable, *abstract_args: Any, topology: str = "v5e:2x2") -> dict[str, Any]:
    """Compile `fn` for one device of a TPU topology, or for a mesh, and return a report.

    fn: traceable, jitted or not. abstract_args: pytrees whose leaves have a shape and a dtype
    (arrays, `jax.ShapeDtypeStruct`); values are not read. If one `jax.ShapeDtypeStruct` lies on a
    mesh of `mesh_for_tpu(topology, …)`, all must. topology: in libtpu's spelling, `v5e:2x2`,
    `v6e:2x2`, `v4:2x2x1`, `v5:2x2x1`, `tpu7x:2x2x1`.

    Returns a dict with target, compiler (libtpu's version), seconds (lowering and compiling), flops
    and bytes (XLA's count for one call; a Pallas kernel without its own estimate counts as −1 or
    0), temporaries, arguments, outputs (bytes of device memory) and collectives (the name of each
    operation, in the compiled program's order).

    The host's own backend stays unchanged. Raises RuntimeError if there is no TPU compiler
    (`why_no_tpu_compiler` gives the reason); ValueError for a topology that libtpu does not know,
    for a leaf without shape and dtype, and for a leaf whose dtype jax would silently narrow.
    """
    start = time.perf_counter()
    compiled = _compile(fn, abstract_args, topology)
    seconds = time.perf_counter() - start
    # Set for the one program that is compiled here, although jax declares both optional.
    memory: Any = compiled.memory_analysis()
    cost: Any = compiled.cost_analysis()
    return {
        "target": f"{_device(topology).device_kind} ({topology})",
        "compiler": f"libtpu {importlib.metadata.version('libtpu')}",
        "seconds": seconds,
        "flops": cost.get("flops", 0.0),
        "bytes": cost.get("bytes accessed", 0.0),
        "temporaries": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "collectives": [each.kind for each in sent(compiled.as_text() or "")],
    }


def mesh_for_tpu(topology: str, axes: Mapping[str, int], axis_type: AxisType) -> Mesh:
    """Return a mesh of all devices of a TPU topology; axes: name → size, all of one type.

    Raises RuntimeError and ValueError as `compile_for_tpu` does.
    """
    _expect_compiler()
    devices = np.array(_devices(topology)).reshape(*axes.values())
    return Mesh(devices, tuple(axes), axis_types=(axis_type,) * len(axes))


def lower_everywhere(
    fn: Callable, *abstract_args: Any, platforms: Sequence[str] = ("cpu", "cuda", "tpu")
) -> dict[str, dict[str, Any]]:
    """Export `fn` for each platform with `jax.export`, and return counts of what it lowers to.

    Returns, for each platform, a dict with seconds, operations (of StableHLO), custom_calls (the
    sorted names of the kernels it needs there) and error: None, or why it does not lower there, in
    which case the others are None. Needs no device and no compiler. Takes the arguments of
    `compile_for_tpu` and raises its ValueError; if `fn` cannot be traced, raises the error of `fn`.
    """
    shapes = _abstract(abstract_args, sharding=None)
    jax.eval_shape(fn, *shapes)
    return {platform: _lowered(fn, shapes, platform) for platform in platforms}


def _compile(fn: Callable, args: tuple, topology: str) -> jax.stages.Compiled:
    _expect_compiler()
    devices = {*_devices(topology)}
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    is_on_mesh = any(own is not None and own.device_set <= devices for own in shardings)
    place = None if is_on_mesh else SingleDeviceSharding(_device(topology))
    return jax.jit(fn).lower(*_abstract(args, place, devices)).compile()


def _expect_compiler() -> None:
    if reason := why_no_tpu_compiler():
        raise RuntimeError(reason)


def _device(topology: str) -> Any:
    return _devices(topology)[0]


@functools.cache
def _devices(topology: str) -> list:
    """Return the devices of a topology; loads libtpu, but creates no backend."""
    with _libtpu_environment():
        try:
            return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        except Exception as error:
            raise ValueError(f"topology: libtpu does not take {topology!r}: {error}") from error


@contextlib.contextmanager
def _libtpu_environment() -> Iterator[None]:
    """Set libtpu's variables while it loads; child processes do not inherit them."""
    added = {k: v for k, v in LIBTPU_ENVIRONMENT.items() if k not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _abstract(
    args: tuple, sharding: SingleDeviceSharding | None, devices: Set[Any] = frozenset()
) -> tuple:
    """Return the shapes and dtypes of `args`; a leaf keeps its own sharding on these devices."""

    def one(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        name = f"abstract_args{jax.tree_util.keystr(path)}"
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ValueError(f"{name}: expected something with shape and dtype, got {leaf!r}")
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            kept = jax.dtypes.canonicalize_dtype(leaf.dtype)
            if kept != leaf.dtype:
                raise ValueError(f"{name}: jax would make {kept} of {leaf.dtype}: enable x64")
        own = getattr(leaf, "sharding", None)
        own = own if own is not None and own.device_set <= devices else sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own)

    return jax.tree_util.tree_map_with_path(one, args)


def _lowered(fn: Callable, shapes: tuple, platform: str) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        text = jax.export.export(jax.jit(fn), platforms=[platform])(*shapes).mlir_module()
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return {"seconds": None, "operations": None, "custom_calls": None, "error": reason}
    return {
        "seconds": time.perf_counter() - start,
        "operations": len(re.findall(r"\bstablehlo\.\w+", text)),
        "custom_calls": sorted(set(re.findall(r"stablehlo\.custom_call @([\w$]+)", text))),
        "error": None,
    }
