"""Check before a run that reports can be written to a directory, and write them after it."""

import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

RESULT_FILES = ("result.json", "summary.md", "index.html")
"""The report files of a run of checks, by a command or by pytest."""


def why_not_writable(directory: Path, names: Iterable[str]) -> str | None:
    """Return why files of these names cannot be written into the directory, or None if they can.

    Creates nothing that outlasts the call, neither a file nor the directory itself.
    """
    absent = [p for p in (directory, *directory.parents) if not os.path.lexists(p)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        return error.strerror or str(error)
    finally:
        for created in absent:
            with suppress(OSError):
                created.rmdir()
    directories = [name for name in names if (directory / name).is_dir()]
    return f"{', '.join(directories)}: a directory" if directories else None


def write(directory: Path, files: Mapping[str, str]) -> None:
    """Write each file (name → text) whole or not at all: to a temporary file, then renamed."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        beside = directory / f".{name}.{os.getpid()}"
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(directory / name)
        finally:
            beside.unlink(missing_ok=True)
