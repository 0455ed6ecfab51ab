"""Where a report goes: looked at before the work whose results it holds."""

import tempfile
from collections.abc import Iterable
from pathlib import Path


def refused(directory: Path, names: Iterable[str]) -> str | None:
    """Make it where it is not; why files of these names cannot be written there, None if they can.

    names: of files, which may be there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        return error.strerror
    taken = [name for name in names if (directory / name).is_dir()]
    return f"{', '.join(taken)}: a directory" if taken else None
