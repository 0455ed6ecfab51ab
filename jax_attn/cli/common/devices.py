"""The kinds of device that jax has on this machine."""

import contextlib
import os

from jax_attn.cli.status import missing
from jax_attn.environment import install_line

KINDS = ("cpu", "gpu", "tpu")


def available() -> set[str]:
    """Those of KINDS on which jax can run here."""
    import jax

    kinds = set()
    for kind in KINDS:
        with contextlib.suppress(RuntimeError):
            jax.devices(kind)
            kinds.add(kind)
    return kinds


def expect_gpu() -> None:
    """Exit unless jax can use a GPU here, naming the pip lines that would let it."""
    if "gpu" not in available():
        missing(
            "no GPU that jax can use is here; with an NVIDIA GPU and driver: "
            f"{install_line('cuda12')} (CUDA 12) or {install_line('cuda13')} (CUDA 13)"
        )


def expect_devices(kind: str, count: int) -> None:
    """Exit unless jax has so many devices of a kind; of CPUs it is told to make as many."""
    option = "--xla_force_host_platform_device_count"
    if kind == "cpu" and option not in (flags := os.environ.get("XLA_FLAGS", "")):
        os.environ["XLA_FLAGS"] = f"{flags} {option}={count}".strip()  # read when jax starts
    if kind not in available():
        missing(f"--mesh needs {count} devices of kind {kind}, and jax has none here")

    import jax

    if (have := len(jax.devices(kind))) < count:
        mend = f"; set XLA_FLAGS={option}={count}" if kind == "cpu" else ""
        missing(f"--mesh needs {count} devices of kind {kind}, and jax has {have}{mend}")
