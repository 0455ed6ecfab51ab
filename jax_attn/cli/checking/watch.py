"""Run a check again whenever a file of the user's changes, and say what moved."""

import math
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from jax_attn.parity.pair.errors import is_users

if TYPE_CHECKING:
    from jax_attn.parity.judge.result import Result

T = TypeVar("T")
_SECONDS = 0.2
"""The time between two looks at the files."""


class UsersModules:
    """The modules of the user's that a run imports, so that the next run imports them anew."""

    def __init__(self, named: str) -> None:
        place = named.rpartition(":")[0]
        self._file = Path(place).resolve() if place.endswith(".py") else None
        self._before = {*sys.modules}
        self._files: set[Path] = set()

    def forget(self) -> None:
        """Remove them from `sys.modules`."""
        for name in self._names():
            del sys.modules[name]

    def files(self, *, failed: bool) -> set[Path]:
        """Return the files to watch; after a run that failed, all that are beside the pair's too.

        The failed run may not have come as far as the import of the file that will change.
        """
        loaded = {Path(sys.modules[name].__file__ or "") for name in self._names()}
        named = set() if self._file is None else {self._file}
        folder = self._file.parent if self._file else Path.cwd()
        self._files |= named | loaded
        return self._files | ({*folder.glob("*.py")} if failed else set())

    def _names(self) -> list[str]:
        files = {
            name: getattr(module, "__file__", None)
            for name, module in [*sys.modules.items()]
            if name not in self._before
        }
        return [name for name, file in files.items() if file and is_users(file)]


def runs(
    named: str,
    check: Callable[[], T | None],
    wait: Callable[[float], None] | None = None,
    further: Collection[Path] = (),
) -> Iterator[T | None]:
    """Yield the outcome of the check, now and after each change of a file; it never ends.

    check: returns None if the file cannot be checked, after saying why. wait: instead of
    `time.sleep`. further: more files to watch; the check may add to them.
    """
    modules = UsersModules(named)
    # A compiled file stands for any source of its size and its second, so for a later save, too.
    sys.dont_write_bytecode = True
    while True:
        before = _stamps(modules.files(failed=True) | {*further})
        modules.forget()
        outcome = check()
        yield outcome
        watched = modules.files(failed=outcome is None) | {*further}
        # A file that changed during the check has another stamp already.
        before = {file: before.get(file, stamp) for file, stamp in _stamps(watched).items()}
        while _stamps(watched) == before:
            (wait or time.sleep)(_SECONDS)


def _stamps(files: set[Path]) -> dict[Path, tuple[int, int]]:
    """Return the time of the last change and the size of each file that exists."""
    stamps = {}
    for file in files:
        try:
            stat = file.stat()
        except OSError:
            continue  # an editor may be replacing it
        stamps[file] = stat.st_mtime_ns, stat.st_size
    return stamps


def moved(before: "Result", after: "Result") -> list[str]:
    """Return a line for everything that differs between two results of one pair."""
    return [*_moved(before, after)]


def _moved(before: "Result", after: "Result") -> Iterator[str]:
    from jax_attn.parity.judge.text import number

    if before.verdict is not after.verdict:
        yield f"verdict: {before.verdict} → {after.verdict}"
    old, new = ({(t.transform, t.label): t for t in r.tensors} for r in (before, after))
    for key in {**old, **new}:
        label = " ".join(key)
        if key not in new or key not in old:
            yield f"{label}: {'no longer compared' if key not in new else 'now compared'}"
        elif old[key].verdict is not new[key].verdict or _jumps(
            old[key].fraction, new[key].fraction
        ):
            states = (f"{t.verdict} at {number(t.fraction)}" for t in (old[key], new[key]))
            yield f"{label}: {' → '.join(states)} of its budget"
    for sign, one, other in (("resolved", before, after), ("new", after, before)):
        theirs = {finding.sentence for finding in other.findings}
        of_tensors = {r for t in one.tensors for r in t.reasons}
        for finding in one.findings:
            is_of_tensor = any(finding.sentence.endswith(reason) for reason in of_tensors)
            if finding.sentence not in theirs and not is_of_tensor:
                yield f"{sign} {finding.weight} ({finding.kind}): {finding.sentence}"


def _jumps(before: float, after: float) -> bool:
    """Return whether an error changed by more than a factor of two."""
    if math.isnan(before) or math.isnan(after):
        return math.isnan(before) is not math.isnan(after)
    return not (before <= 2 * after and after <= 2 * before)
