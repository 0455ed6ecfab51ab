"""What the compilers for other devices say, on a host that has none of those devices.

`compile_for_tpu` runs the real TPU compiler (libtpu) for a TPU that is not there: proof that
a function compiles, and what it would take; nothing is run, so it proves no number right.
`lower_everywhere` goes as far as the portable form that each device's compiler would be given.
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
# tell which TPU it is on. What it compiles for, the topology says.
LIBTPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def why_no_tpu_compiler() -> str | None:
    """None where `compile_for_tpu` can work; else why not, with the line that would mend it."""
    if importlib.util.find_spec("libtpu") is None:
        return f"the TPU compiler, libtpu, is not installed: {INSTALL}"
    try:
        _device("v5e:2x2")
    except Exception as error:
        first_line = str(error).strip().split("\n")[0]
        return f"the TPU compiler, libtpu, is installed but does not load: {first_line}"
    return None


def compile_for_tpu(fn: Callable, *abstract_args: Any, topology: str = "v5e:2x2") -> dict[str, Any]:
    """Compile `fn` for one device of a TPU topology, or for a mesh, and report, in plain data.

    fn: traceable, jitted or not. abstract_args: pytrees whose leaves have a shape and a dtype
    (arrays, `jax.ShapeDtypeStruct`); values are not looked at. Where a `jax.ShapeDtypeStruct` lies
    on a mesh of `mesh_for_tpu(topology, …)`, all do. topology: as libtpu spells it, `v5e:2x2`,
    `v6e:2x2`, `v4:2x2x1`, `v5:2x2x1`, `tpu7x:2x2x1`.

    Returns target, compiler (libtpu's version), seconds (lowering and compiling), flops and
    bytes (XLA's count for one call; a Pallas kernel without an estimate of its own counts as
    −1 or 0), temporaries, arguments, outputs (bytes of device memory), collectives (names,
    one an operation, in the compiled program's order).

    The host's own backend is left as it is. Raises RuntimeError where there is no TPU compiler
    (`why_no_tpu_compiler` says why), ValueError for a topology that libtpu does not know and
    for a leaf without shape and dtype, or of a width that jax would narrow silently.
    """
    start = time.perf_counter()
    compiled = _compile(fn, abstract_args, topology)
    seconds = time.perf_counter() - start
    # As dict and text for the one program that is compiled here; jax declares them optional.
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
    """A mesh of all devices of a TPU topology; axes: name → size, all of one type.

    Raises RuntimeError and ValueError as `compile_for_tpu` does.
    """
    _expect_compiler()
    devices = np.array(_devices(topology)).reshape(*axes.values())
    return Mesh(devices, tuple(axes), axis_types=(axis_type,) * len(axes))


def lower_everywhere(
    fn: Callable, *abstract_args: Any, platforms: Sequence[str] = ("cpu", "cuda", "tpu")
) -> dict[str, dict[str, Any]]:
    """Export `fn` for each platform, as `jax.export` does, and keep nothing but the tally.

    Returns, for each platform, seconds, operations (of StableHLO), custom_calls (the kernels
    it would need there, by name, sorted) and error: None, or why it does not lower there, the
    others being None then. Needs no device and no compiler. Arguments, and the ValueError for
    them, as `compile_for_tpu`'s; a function that cannot be traced raises its own error.
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
    """The devices of a topology; loads libtpu, but makes no backend of it."""
    with _libtpu_environment():
        try:
            return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        except Exception as error:
            raise ValueError(f"topology: libtpu does not take {topology!r}: {error}") from error


@contextlib.contextmanager
def _libtpu_environment() -> Iterator[None]:
    """What libtpu is to find when it loads; child processes do not inherit it."""
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
    """A leaf's own sharding among these devices stays in place of the given one."""

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
