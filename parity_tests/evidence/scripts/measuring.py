"""What the scripts beside this one share: where evidence lies, how it is timed, kept and shown."""

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jax_attn.environment import describe

DATA = Path(__file__).parents[1] / "data"
PROFILE = DATA / "profile"
ROOT = DATA.parents[2]
SCRIPTS = "parity_tests/evidence/scripts"

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


def kept(name: str, folder: Path = PROFILE) -> dict[str, Any]:
    """What profile/NAME.json has."""
    return json.loads((folder / f"{name}.json").read_text())


def table(head: Collection[str], rows: Iterable[Iterable[object]]) -> str:
    """A table of Markdown."""
    first, *others = (f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows))
    rule = "|---" * len(head) + "|"
    return "\n".join([first, rule, *others])


def where(environment: Mapping[str, Any]) -> str:
    """The machine and the versions of a run."""
    versions = (f"{k} {environment['packages'][k]}" for k in ("jax", "flax", "torch"))
    beside = f", {device(environment)}" if device(environment) else ""
    machine = f"{environment['processor']}, {environment['cores']} cores{beside}"
    return f"{machine}, Python {environment['python']}, {', '.join(versions)}"


def device(environment: Mapping[str, Any]) -> str:
    """The GPUs or TPUs of a run; "" if it had none."""
    named = (name.partition(": ") for name in environment["devices"])
    return ", ".join(kind for platform, _, kind in named if platform != "cpu")


def beside(path: Path) -> str:
    """The link to a file of the evidence, on a page of docs/reference."""
    return f"../../{path.relative_to(ROOT)}"
