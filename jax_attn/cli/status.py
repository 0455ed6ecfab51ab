"""The exit statuses of the commands, and functions that exit early."""

import sys
from enum import IntEnum
from typing import Any, NoReturn

import click

from jax_attn.environment import install_line, present


class Exit(IntEnum):
    """Exit statuses. The first three carry the names of verdicts: `Exit[verdict]`."""

    PASS = 0
    FAIL = 1
    INCONCLUSIVE = 4
    USAGE = 2
    ENVIRONMENT = 3
    INTERRUPTED = 130  # 128 + the number of the signal, as shells report it
    TERMINATED = 143
    CRASHED = 70  # EX_SOFTWARE of sysexits.h; Python's own 1 would read as FAIL


class WrongInput(click.ClickException):
    """Input that cannot be used: one message, no traceback."""

    exit_code = Exit.USAGE


def missing(message: str) -> NoReturn:
    """Exit because the environment lacks something; the message says how to install it."""
    click.echo(f"Error: {message}", err=True)
    sys.exit(Exit.ENVIRONMENT)


def refuse(error: Any) -> NoReturn:
    """Exit because of a TransferError: unusable input, or a missing package."""
    if any("pip install" in problem.hint for problem in error.problems):
        missing(str(error))
    raise WrongInput(str(error)) from error


def expect_installed(module: str, purpose: str, extra: str) -> None:
    """Exit unless the module is installed; the message shows the pip command for its extra.

    purpose: why the module is needed, such as "is the reference".
    """
    if not present(module):
        missing(f"{module} is not installed, and {purpose}: {install_line(extra)}")
