"""Settings of torch, for the whole process, under which a module is run."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from jax_attn.parity.run.modes.float64_mode import Float64


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: sums keep one order, and no thread waits for another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def own_products() -> Iterator[None]:
    """Compute products by torch itself, not by oneDNN."""
    onednn: Any = torch.backends.mkldnn
    before = onednn.enabled
    onednn.enabled = False
    try:
        yield
    finally:
        onednn.enabled = before


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Compute attention from its parts; a mode cannot see inside a fused kernel."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextlib.contextmanager
def set_for_all_threads() -> Iterator[None]:
    """Set the process-wide settings of float64 runs around several concurrent ones.

    They include torch's flag that a mode is on, which a thread that ends would reset for a thread
    that goes on.
    """
    with one_thread(), plain_kernels(), Float64():
        yield
