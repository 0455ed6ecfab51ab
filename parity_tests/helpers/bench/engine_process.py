"""What an engine changes or shows in its process: settings to restore, compilations to count."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import torch


@contextmanager
def restored_settings() -> Iterator[None]:
    """An engine sets up its whole process, a worker's; here other tests follow in the same one."""
    names = ("jax_default_matmul_precision", "jax_enable_compilation_cache")
    before, threads = {name: jax.config.values[name] for name in names}, torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch._inductor.config.force_disable_caches = False


@contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that grows by one event with each program that XLA compiles."""
    events: list[str] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
