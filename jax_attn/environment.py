"""Where a result was made: versions, devices, precision settings, what is missing."""

import importlib.metadata
import importlib.util
import os
import platform
import re
from pathlib import Path
from typing import Any

PACKAGES = ("jax-attn", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "safetensors", "torch")

# extra -> the module that shows it is installed, and what it is for.
EXTRAS = {
    "torch": ("torch", "the reference side: verify, check"),
    "tpu": ("libtpu", "the TPU, or its compiler on a host without one"),
    "cuda12": ("jax_cuda12_plugin", "NVIDIA GPUs, CUDA 12"),
    "cuda13": ("jax_cuda13_plugin", "NVIDIA GPUs, CUDA 13"),
    "hf": ("transformers", "reference models"),
    "models": ("tokenizers", "the sentence encoder"),
    "bench": ("matplotlib", "plots of measurements, and peers to measure against"),
    "dev": ("pytest", "the tests"),
    "docs": ("sphinx", "the documentation"),
}

_JAX_SETTINGS = {"jax_default_matmul_precision": str, "jax_enable_x64": bool}


def install_line(extra: str) -> str:
    """The command that installs an extra's packages, which this package's metadata names."""
    marker = re.compile(rf"""extra == ["']{extra}["']""")
    try:
        requirements = importlib.metadata.requires("jax-attn") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    packages = [r.partition(";")[0].strip() for r in requirements if marker.search(r)]
    return f"pip install {' '.join(map(repr, packages)) or repr(f'.[{extra}]')}"


def settle_platforms() -> None:
    """Choose JAX's platforms, unless the user has: those whose device is present.

    Left alone, jax asks every plugin that is installed, and libtpu without a TPU searches the
    network for one. Call this before jax starts.
    """
    platforms = []
    if present("libtpu") and (list(Path("/dev").glob("accel*")) or Path("/dev/vfio/0").exists()):
        platforms.append("tpu")
    if any(present(EXTRAS[e][0]) for e in ("cuda12", "cuda13")) and Path("/dev/nvidia0").exists():
        platforms.append("cuda")
    os.environ.setdefault("JAX_PLATFORMS", ",".join([*platforms, "cpu"]))


def version(package: str) -> str | None:
    """The installed version; None where it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def present(module: str) -> bool:
    """Whether `module` could be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def describe() -> dict[str, Any]:
    """Plain data for a report's head; starts jax."""
    import jax

    versions = {name: version(name) for name in PACKAGES}
    return {
        "python": platform.python_version(),
        "packages": {name: v for name, v in versions.items() if v is not None},
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "devices": [f"{d.platform}: {d.device_kind}" for d in jax.devices()],
        **{name: setting(getattr(jax.config, name)) for name, setting in _JAX_SETTINGS.items()},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


# Linux's name of a processor's vector or matrix instructions -> what they are called, widest first.
_INSTRUCTIONS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON"}


def _processor() -> str:
    """The model's name and its widest instructions from Linux, else what Python knows.

    Virtual machines often give models of several generations one name.
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
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError, IndexError):
        return None
