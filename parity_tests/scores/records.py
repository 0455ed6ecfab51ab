"""The kept records of pairs, a line each, which several processes may add to."""

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "parity_tests" / "evidence" / "data" / "profile" / "scores.jsonl"
ENVIRONMENT = RECORDS.with_name("scores_environment.json")


def kept() -> dict[str, dict[str, Any]]:
    """Return the records by the name of their pair."""
    text = RECORDS.read_text() if RECORDS.exists() else ""
    found = {}
    for line in text.splitlines():
        with suppress(json.JSONDecodeError):  # a process may have ended within a line
            record = json.loads(line)
            found[record.pop("name")] = record
    return found


def keep(name: str, record: dict[str, Any]) -> None:
    """Add a record; a line that another process is writing is not cut."""
    with RECORDS.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(_missing_end() + json.dumps({"name": name, **record}, ensure_ascii=False) + "\n")


def keep_environment(environment: dict[str, Any]) -> None:
    """Write the machine and the versions of the last run, whole."""
    unfinished = ENVIRONMENT.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(environment, indent=1) + "\n")
    unfinished.replace(ENVIRONMENT)


def environment() -> dict[str, Any]:
    """Return the machine and the versions of the last run."""
    return json.loads(ENVIRONMENT.read_text())


def _missing_end() -> str:
    """The end of the last line, if a process ended within it."""
    text = RECORDS.read_bytes()
    return "" if not text or text.endswith(b"\n") else "\n"
