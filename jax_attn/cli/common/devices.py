"""The kinds of device that jax has on this machine."""

import contextlib

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
