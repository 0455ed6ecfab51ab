"""Environment of a result: versions, devices, precision settings, missing extras."""

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PACKAGES = ("jax-attn", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "safetensors", "torch")

# extra -> the module that shows that it is installed, and its purpose.
EXTRAS = {
    "torch": ("torch", "the reference side: verify, check"),
    "translate": ("ruff", "the formatting of translated sources"),
    "tpu": ("libtpu", "the TPU, or its compiler on a host without one"),
    "cuda12": ("jax_cuda12_plugin", "NVIDIA GPUs, CUDA 12"),
    "cuda13": ("jax_cuda13_plugin", "NVIDIA GPUs, CUDA 13"),
    "hf": ("transformers", "reference models"),
    "bench": ("matplotlib", "plots of measurements, and peers to measure against"),
    "dev": ("pytest", "the tests"),
    "docs": ("sphinx", "the documentation"),
}

_JAX_SETTINGS = {"jax_default_matmul_precision": str, "jax_enable_x64": bool}


def install_line(extra: str) -> str:
    """Return the command that installs an extra's packages, as in this package's metadata."""
    marker = re.compile(rf"""extra == ["']{extra}["']""")
    try:
        requirements = importlib.metadata.requires("jax-attn") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    packages = [r.partition(";")[0].strip() for r in requirements if marker.search(r)]
    return f"pip install {' '.join(map(repr, packages)) or repr(f'.[{extra}]')}"


def settle_platforms() -> None:
    """Choose JAX's platforms by the devices that are present, unless the user has chosen.

    Otherwise jax asks every installed plugin, and libtpu without a TPU searches the network for
    one; and the first of several processes would take three quarters of a GPU's memory. Call this
    before jax starts.
    """
    platforms = []
    if present("libtpu") and (list(Path("/dev").glob("accel*")) or Path("/dev/vfio/0").exists()):
        platforms.append("tpu")
    if any(present(EXTRAS[e][0]) for e in ("cuda12", "cuda13")) and Path("/dev/nvidia0").exists():
        platforms.append("cuda")
    os.environ.setdefault("JAX_PLATFORMS", ",".join([*platforms, "cpu"]))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def version(package: str) -> str | None:
    """Return the installed version; None if the package is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def present(module: str) -> bool:
    """Return whether `module` could be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def of_jax() -> dict[str, Any]:
    """Return the part of `describe` that starts jax: its devices and settings."""
    import jax

    return {
        "devices": [f"{d.platform}: {d.device_kind}" for d in jax.devices()],
        **{name: setting(getattr(jax.config, name)) for name, setting in _JAX_SETTINGS.items()},
    }


def describe(jax_part: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return plain data for a report's head.

    jax_part: `of_jax` of the process in which the port ran; without it, jax is started in this one.
    """
    versions = {name: version(name) for name in PACKAGES}
    return {
        "python": platform.python_version(),
        "packages": {name: v for name, v in versions.items() if v is not None},
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        **(of_jax() if jax_part is None else jax_part),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


# Linux's names of a processor's vector or matrix instructions -> common names, widest first.
_INSTRUCTIONS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON"}


def _processor() -> str:
    """Return the model's name and its widest instructions from Linux, else what Python knows.

    Virtual machines often give models of several generations the same name.
    """
    info = Path("/proc/cpuinfo")
    lines = re.findall(r"^(.+?)\s*:(.*)", info.read_text() if info.exists() else "", re.M)
    about = dict(reversed(lines))
    name = about.get("model name", "").strip() or platform.processor()
    flags = (about.get("flags") or about.get("Features") or "").split()
    widest = next((called for flag, called in _INSTRUCTIONS.items() if flag in flags), None)
    return f"{name} ({widest})" if widest else name


_MEMINFO = Path("/proc/meminfo")


def free_memory() -> int | None:
    """Return the bytes available without swapping; None if the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError, IndexError):
        return None
