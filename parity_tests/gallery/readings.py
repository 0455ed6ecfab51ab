"""Read the lines of source that findings name, and run their scripts."""

import importlib.util
import subprocess
import sys
from pathlib import Path

REPROS = Path(__file__).parent / "repros"
SECONDS = 300


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
    """Return what a script of `repros` prints; None if a package that it imports is absent.

    Raises:
      RuntimeError: it ends with another error.
    """
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(REPROS / repro)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if run.returncode == 0:
        return run.stdout
    if "ModuleNotFoundError" in run.stderr:
        return None
    raise RuntimeError(f"{repro} fails:\n{run.stderr}")
