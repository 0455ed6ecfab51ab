"""The kinds of device that jax has on this machine."""

import contextlib
import os

from jax_attn.cli.status import missing
from jax_attn.environment import install_line

KINDS = ("cpu", "gpu", "tpu")


def available() -> set[str]:
    """Return the kinds of device on which jax can run here."""
    import jax

    kinds = set()
    for kind in KINDS:
        with contextlib.suppress(RuntimeError):
            jax.devices(kind)
            kinds.add(kind)
    return kinds


def expect_gpu() -> None:
    """Exit unless jax can use a GPU here; the message shows the pip commands to install."""
    if "gpu" not in available():
        missing(
            "jax finds no usable GPU; with an NVIDIA GPU and driver, run: "
            f"{install_line('cuda12')} (CUDA 12) or {install_line('cuda13')} (CUDA 13)"
        )


def expect_devices(kind: str, count: int) -> None:
    """Exit unless jax has `count` devices of a kind; ask XLA for as many virtual CPU devices."""
    option = "--xla_force_host_platform_device_count"
    if kind == "cpu" and option not in (flags := os.environ.get("XLA_FLAGS", "")):
        os.environ["XLA_FLAGS"] = f"{flags} {option}={count}".strip()  # read when jax starts
    if kind not in available():
        missing(f"--mesh needs {count} devices of kind {kind}, and jax has none")

    import jax

    if (have := len(jax.devices(kind))) < count:
        mend = f"; set XLA_FLAGS={option}={count}" if kind == "cpu" else ""
        missing(f"--mesh needs {count} devices of kind {kind}, and jax has {have}{mend}")
