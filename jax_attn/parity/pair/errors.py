"""Errors of a user's file: shown with those traceback lines that are the user's own."""

import sysconfig
import traceback
from pathlib import Path


class PairError(ValueError):
    """There is no pair to compare; the message is complete without a traceback."""


class MissingModuleError(PairError):
    """A user's file imports a module that is not installed. `name`: its top-level package."""

    def __init__(self, message: str, name: str):
        super().__init__(message)
        self.name = name


def told(error: BaseException) -> str:
    """Return an error's message, followed by the user's lines that led to it, if any did."""
    wrapped = _unwrapped(error)
    lines = of_user(error)
    if wrapped is not error:
        return f"{error}\n{lines}"
    return lines if lines.startswith("Traceback") else str(error)


def of_user(error: BaseException) -> str:
    """Format an error that a user's code raised, with only the traceback lines in user's files.

    The errors of this package that only report another one are left out. Errors that led to it are
    shown first, as Python shows them.
    """
    report = traceback.TracebackException.from_exception(_unwrapped(error))
    _keep_users(report)
    return "".join(report.format()).rstrip()


def _unwrapped(error: BaseException) -> BaseException:
    while type(error).__module__.startswith("jax_attn.") and error.__cause__ is not None:
        error = error.__cause__
    return error


def _keep_users(report: traceback.TracebackException) -> bool:
    """Keep only the user's frames, and earlier errors with some; return whether any is kept."""
    frames = [frame for frame in report.stack if _is_users(frame.filename)]
    # Without a stack, Python prints no heading for one.
    report.stack = traceback.StackSummary.from_list(frames) if frames else None  # type: ignore[assignment]
    for name in ("__cause__", "__context__"):
        earlier = getattr(report, name)
        if earlier is not None and not _keep_users(earlier):
            setattr(report, name, None)
    return bool(frames)


def _is_users(file: str) -> bool:
    """Return whether a file belongs neither to this package nor to installed ones nor to Python."""
    paths = sysconfig.get_paths()
    installed = (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    others = (str(Path(__file__).parents[2]), *installed)
    is_installed = {"site-packages", "dist-packages"} & {*Path(file).parts}
    return not (is_installed or file.startswith(("<", *others)))
