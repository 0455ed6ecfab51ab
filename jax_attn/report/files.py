"""Where a report goes: looked at before the work whose results it holds."""

import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

RESULT = ("result.json", "summary.md")
"""Of a run of checks, by a command or by pytest."""


def refused(directory: Path, names: Iterable[str]) -> str | None:
    """Why files of these names could not be written there, None if they could.

    Leaves nothing there, nor the directory itself where it is not.
    """
    absent = [p for p in (directory, *directory.parents) if not os.path.lexists(p)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        return error.strerror or str(error)
    finally:
        for made in absent:
            with suppress(OSError):
                made.rmdir()
    taken = [name for name in names if (directory / name).is_dir()]
    return f"{', '.join(taken)}: a directory" if taken else None
