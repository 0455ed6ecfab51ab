"""All that is measured on a GPU, by one command, the most telling first.

    python parity_tests/evidence/scripts/gpu.py [--minutes 10] [--into FOLDER] [STEP ...]

runs each step in a process of its own, steps that only judge beside one another and what is timed
alone. It ends when the time is up: a step that runs then is interrupted, and keeps what it has.
FOLDER, evidence/data/gpu unless given, holds what each step printed and wrote, and steps.json: how
each ended, where, and the driver and clocks before and after. `--on cpu` tries the same steps where
there is no GPU, on few rows and small sizes.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measuring import DATA, as_text

from jax_attn.environment import settle_platforms

HERE = Path(__file__).parent
SMI = "name,driver_version,clocks.sm,clocks.max.sm,memory.total,power.limit,temperature.gpu"
CLI = (sys.executable, "-m", "jax_attn")
LEAST_SECONDS = 10
"""A step is not begun with less left."""
TO_WRITE_SECONDS = 20
"""What a step has, once it is interrupted, to write what it has."""


@dataclass(frozen=True)
class Step:
    """command: {on} stands for the device, {into} for the step's folder. seconds: the most it gets.
    on_gpu, on_cpu: the rest of the command on either; on_cpu None: it cannot be tried there."""

    command: tuple[str, ...]
    seconds: float
    on_gpu: tuple[str, ...] = ()
    on_cpu: tuple[str, ...] | None = None

    def line(self, on: str, into: Path) -> list[str]:
        """The command on one device; into: the folder for what it writes."""
        rest = self.on_gpu if on == "gpu" else self.on_cpu or ()
        return [word.format(on=on, into=into) for word in (*self.command, *rest)]


def _verify(*options: str, seconds: float = 150) -> Step:
    command = (*CLI, "verify", "--backend", "{on}", "--report", "{into}", *options)
    return Step(command, seconds, on_cpu=("--design", "gqa", "-k", "causal"))


def _bench(
    preset: str, small: str, *options: str, dtype: str = "bfloat16", seconds: float = 180
) -> Step:
    """small: the workload on a CPU."""
    command = (*CLI, "bench", "--device", "{on}", "--report", "{into}", "--dtype", dtype, *options)
    fewer = ("--preset", small, "--dtype", "float32", "--rounds", "1")
    fewer += ("--implementation", "jax-attn")
    return Step(command, seconds, ("--preset", preset), fewer)


_MODELS = (sys.executable, str(HERE / "whole_models.py"), "--output", "{into}/whole_models.json")
_TESTS = (sys.executable, "-m", "pytest", "-q", "--gpu", str(HERE.parents[1] / "on_gpu"))

STEPS = {
    "doctor": Step((*CLI, "doctor", "--json"), 60, on_cpu=()),
    "verify": _verify(seconds=400),
    "tests": Step(_TESTS, 240),
    **{f"verify {kernel}": _verify("--implementation", kernel) for kernel in ("cudnn", "blocked")},
    # Gradients take minutes to judge, on the CPU in float64.
    "bench": _bench("gpu", "seeds/2x5x64", "--mode", "forward"),
    "bench decode": _bench("gpu-decode", "decode/512of512", seconds=90),
    "models": Step((*_MODELS, "BERT, base", "GPT-2, small"), 300),  # minutes on a CPU
    "verify dense": _verify("--implementation", "dense"),
    "bench backward": _bench("gpu", "seeds/2x5x64", "--mode", "forward+backward"),
    "bench 64": _bench("gpu-64", "seeds/2x5x64"),
    "bench float32": _bench("gpu", "seeds/2x5x64", dtype="float32"),
    "verify all": _verify("--all", seconds=900),
}
BESIDE = {"tests": "verify", "verify cudnn": "verify", "verify blocked": "verify"}
BESIDE |= {"verify dense": "models"}
"""A step that only judges -> the step before it that it runs beside, where there is a GPU."""


@dataclass
class Run:
    """What has been run so far; `keep` writes it. deadline, clock: in seconds."""

    on: str
    into: Path
    deadline: float
    clock: Callable[[], float] = time.monotonic
    steps: dict[str, Any] = field(default_factory=dict)
    gpu: list[str] = field(default_factory=list)

    def all(self, steps: dict[str, Step], names: Collection[str]) -> None:
        """Each of these steps, as long as there is time."""
        self.into.mkdir(parents=True, exist_ok=True)
        self.gpu.append(described())
        for first in names:
            if self._leader(first, names) == first:
                self._together({n: steps[n] for n in names if self._leader(n, names) == first})
        self.gpu.append(described())
        self.keep()

    def keep(self) -> None:
        """Write steps.json, whole or not at all."""
        text = as_text({"on": self.on, "gpu": self.gpu, "steps": self.steps})
        unfinished = self.into / "steps.json.part"
        unfinished.write_text(text)
        unfinished.replace(self.into / "steps.json")

    def _leader(self, name: str, names: Collection[str]) -> str:
        leader = BESIDE.get(name, name)
        return leader if leader in names and self.on == "gpu" else name

    def _together(self, steps: dict[str, Step]) -> None:
        left = self.deadline - self.clock()
        begun, running = self.clock(), {}
        for name, step in steps.items():
            if self.on == "cpu" and step.on_cpu is None:
                self.steps[name] = {"ended": "not run: it needs a GPU"}
            elif left < LEAST_SECONDS:
                self.steps[name] = {"ended": "not run: the time was up"}
            else:
                folder = self.into / name.replace(" ", "-")
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                line = step.line(self.on, folder)
                running[name] = started(line, folder / "printed.txt"), line
        for name in sorted(running, key=lambda name: steps[name].seconds):
            process, line = running[name]
            seconds = min(steps[name].seconds, left) - (self.clock() - begun)
            ended = ended_by(process, max(0, seconds))
            ended = {"command": line, "seconds": self.clock() - begun, "ended": ended}
            self.steps[name] = ended | {"beside": sorted({*running} - {name})}
        for name in steps:
            print(f"{name}: {self.steps[name]['ended']}", flush=True)
        self.keep()


def started(line: list[str], printed: Path) -> subprocess.Popen[bytes]:
    """Begin a command that heeds interrupts; printed: the file for all that it prints."""
    # A shell has what it runs in the background ignore interrupts, and a command inherits that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        # A group of its own: what the command starts is interrupted with it.
        with printed.open("w") as file:
            return subprocess.Popen(line, stdout=file, stderr=file, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, before)


def ended_by(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Wait so long for a command, interrupt it when its time is up, and say how it ended."""
    try:
        return f"status {process.wait(seconds)}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
    try:
        return f"interrupted, status {process.wait(TO_WRITE_SECONDS)}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "killed"


def described() -> str:
    """The GPU's name, driver, clocks and power limit, as nvidia-smi has them; "" without one."""
    command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--into", type=Path, default=DATA / "gpu")
    parser.add_argument("--on", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    given = parser.parse_args()
    if unknown := [name for name in given.steps if name not in STEPS]:
        parser.error(f"STEP: expected some of {', '.join(STEPS)}, got {', '.join(unknown)}")
    settle_platforms()
    deadline = time.monotonic() + 60 * given.minutes - TO_WRITE_SECONDS
    Run(given.on, given.into, deadline).all(STEPS, given.steps or STEPS)


if __name__ == "__main__":
    main()
