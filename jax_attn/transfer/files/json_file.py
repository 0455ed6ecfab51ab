"""JSON files, read with a check that names in an object are unique."""

import json
import os
import stat
from pathlib import Path
from typing import Any

_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"))


def read_json(path: Path) -> Any:
    """Return the content of a file. Raises ValueError, RecursionError or OSError if it is not JSON.

    ValueError also for a name that occurs twice in one object, and for anything that is not a file,
    which is checked before opening: a pipe could block for ever.
    """
    if os.path.lexists(path) and (why := _why_no_file(path)):
        raise ValueError(why)
    return json.loads(path.read_text("utf-8"), object_pairs_hook=unique)


def _why_no_file(path: Path) -> str:
    """Say what is there instead of a file; "" for a file, or a link to one."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        is_link = os.path.islink(path)
        return f"it is a broken link: {error}" if is_link else str(error)
    if stat.S_ISREG(mode):
        return ""
    kind = next((words for is_so, words in _KINDS if is_so(mode)), "a device or a socket")
    return f"it is {kind}, not a file"


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, checking that no name occurs twice; Python would keep the last one."""
    by_name = dict(pairs)
    if len(by_name) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"named more than once: {twice}")
    return by_name
