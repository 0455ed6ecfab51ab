"""What the scripts beside this one share: where the evidence lies, and how it is timed and kept."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jax_attn.environment import describe

DATA = Path(__file__).parents[1] / "data"
PROFILE = DATA / "profile"

Name = TypeVar("Name")


def seconds(call: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turn(calls: Mapping[Name, Callable[[], float]], rounds: int) -> dict[Name, list[float]]:
    """What each call returns, by rounds in which all take turns; a first round, which compiles,
    is not among them."""
    results: dict[Name, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            result = call()
            if i:
                results[name].append(result)
    return results


def as_text(measurements: Mapping[str, Any]) -> str:
    """JSON, with where it was measured."""
    return json.dumps({"environment": describe()} | dict(measurements), indent=1) + "\n"


def keep(name: str, measurements: Mapping[str, Any]) -> str:
    """Write profile/NAME.json; its text."""
    text = as_text(measurements)
    (PROFILE / f"{name}.json").write_text(text)
    return text
