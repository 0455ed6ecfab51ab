"""How many programs XLA compiles in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax


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
