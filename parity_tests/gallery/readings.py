"""Read the lines of source that findings name, and run their scripts."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
REPROS = FOLDER / "repros"
SECONDS = 300


def findings() -> list[dict[str, Any]]:
    """Return the findings, as they were written by hand."""
    return tomllib.loads((FOLDER / "findings.toml").read_text())["finding"]


def quoted(source: str) -> str | None:
    """Return the line that "package/file.py:12" names; None if the package is not installed."""
    path, _, number = source.partition(":")
    package, _, inside = path.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    lines = (Path(spec.submodule_search_locations[0]) / inside).read_text().splitlines()
    return lines[int(number) - 1].strip()


def printed(repro: str) -> str | None:
    """Return what a script of `repros` prints; None if it raises, as where a package is absent."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(REPROS / repro)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    return run.stdout if run.returncode == 0 else None
