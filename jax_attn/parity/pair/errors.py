"""Errors of a user's file: shown with those traceback lines that are the user's own."""

import sysconfig
import traceback
from pathlib import Path

_OURS = str(Path(__file__).parents[2])
"""The folder of this package."""


class PairError(ValueError):
    """There is no pair to compare; the message is complete without a traceback."""


class MissingModuleError(PairError):
    """A user's file imports a module that is not installed. `name`: its top-level package."""

    def __init__(self, message: str, name: str):
        super().__init__(message)
        self.name = name


def refusal(error: BaseException) -> PairError | None:
    """Return the error that says why a check cannot run; None if it is a mistake of this package.

    It cannot run if the user's code raises, or if this package refuses the arguments.
    """
    origin = _unwrapped(error)
    if isinstance(origin, ModuleNotFoundError) and origin.name:
        return MissingModuleError(told(error), origin.name.partition(".")[0])
    is_refused = isinstance(error, TypeError | ValueError) and _is_raised_here(error)
    is_of_user = origin is not error or of_user(error).startswith("Traceback")
    return PairError(told(error)) if is_refused or is_of_user else None


def _is_raised_here(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_OURS)


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
    frames = [frame for frame in report.stack if is_users(frame.filename)]
    # Without a stack, Python prints no heading for one.
    report.stack = traceback.StackSummary.from_list(frames) if frames else None  # type: ignore[assignment]
    for name in ("__cause__", "__context__"):
        earlier = getattr(report, name)
        if earlier is not None and not _keep_users(earlier):
            setattr(report, name, None)
    return bool(frames)


def is_users(file: str) -> bool:
    """Return whether a file belongs neither to this package nor to installed ones nor to Python."""
    paths = sysconfig.get_paths()
    installed = (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    others = (_OURS, *installed)
    is_installed = {"site-packages", "dist-packages"} & {*Path(file).parts}
    return not (is_installed or file.startswith(("<", *others)))
