"""Name the rooms whose slow tests a change calls for: the changed ones and all that import them."""

import subprocess
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
EVERY = frozenset({"every room"})
_OF_ALL = ("pyproject.toml", "parity_tests/conftest.py", "parity_tests/helpers/")
"""What the tests of all rooms use."""
_ROOMS_OF_ROOMS = ("parity", "porting", "selfcheck")


def changed_since(revision: str) -> list[str]:
    """List the files that differ from a git revision, as paths from the repository's root."""
    command = ["git", "diff", "--name-only", "--no-renames", revision, "--"]
    return subprocess.check_output(command, cwd=ROOT, text=True).splitlines()


def room_of(path: str) -> str:
    """Return the room of a file of the package or of its tests: cli, parity/run.

    Returns "" for a file in no room.
    """
    folders = PurePosixPath(path).parent.parts
    folders = folders[folders[:1] in (("jax_attn",), ("parity_tests",)) :]
    return "/".join(folders[: 2 if folders[:1] and folders[0] in _ROOMS_OF_ROOMS else 1])


def rooms_to_test(paths: Iterable[str]) -> frozenset[str]:
    """Return the rooms whose tests the changed files call for, or `EVERY`.

    A changed module calls for its own room and for the rooms of all that import it, directly or
    not; changed tests call for their own room only.
    """
    import grimp

    graph = grimp.build_graph("jax_attn", "torch_ref", cache_dir=None)
    files = {_file_of(module): module for module in graph.modules}
    rooms = set()
    for path in paths:
        if path.startswith(_OF_ALL):
            return EVERY
        if (module := files.get(path)) is not None:
            is_package = path.endswith("__init__.py")  # which each of its modules imports
            reached = graph.find_downstream_modules(module, as_package=is_package)
            reached |= {module, *(graph.find_descendants(module) if is_package else ())}
            rooms |= {room_of(_file_of(name)) for name in reached}
        elif path.startswith(("jax_attn/", "torch_ref/")):
            return EVERY  # it was removed, or is no module: who used it is not known
        elif path.startswith(("parity_tests/", "docs/", "README.md")):
            rooms.add(room_of(path))
    return frozenset(rooms)


def _file_of(module: str) -> str:
    path = module.replace(".", "/")
    return f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"


def calls_for(rooms: frozenset[str], test: str) -> bool:
    """Return whether a file of tests is in one of the rooms.

    Tests that mirror no room, such as those of the documentation, belong to any.
    """
    room = room_of(test)
    mirrors = room == "torch_ref" or (room and (ROOT / "jax_attn" / room).is_dir())
    return rooms == EVERY or room in rooms or (bool(rooms) and not mirrors)
