"""`jax-attn`: one file a command, each imported when it is needed."""

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import click

from jax_attn.cli.status import Exit

COMMANDS = ("verify", "power", "calibrate", "doctor", "bench", "inspect", "port")


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM, raised like Ctrl-C so that the same code tidies up."""


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        return importlib.import_module(f"jax_attn.cli.{name}").command

    def main(self, *args: Any, **extra: Any) -> Any:
        """Print what the terminal's encoding lacks as escapes; report a full or closed output.

        click alone would show a traceback.
        """
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        try:
            return super().main(*args, **extra)
        except OSError as error:
            if error.filename is not None:  # of a file, not of a stream
                raise
            _silence(sys.stdout)
            with contextlib.suppress(OSError):
                click.echo(f"Error: output cannot be written: {error.strerror}", err=True)
            sys.exit(Exit.ENVIRONMENT)

    def invoke(self, ctx: click.Context) -> object:
        """Exit with a shell's statuses: click's own for Ctrl-C is that of a parity failure."""
        try:
            with _termination_raised():
                return super().invoke(ctx)
        except _TerminatedError:
            click.echo("terminated", err=True)
            ctx.exit(Exit.TERMINATED)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(Exit.INTERRUPTED)


def _silence(stream: Any) -> None:
    """Discard what the stream still holds: on exit, Python would fail to write it again."""
    with contextlib.suppress(OSError):  # a stream in memory has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def _termination_raised() -> Iterator[None]:
    def raise_terminated(*_: Any) -> None:
        raise _TerminatedError

    unhandled = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not unhandled or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="jax-attn")
def main() -> None:
    """PyTorch attention in JAX/Flax, proved equal.

    \b
    Exit status: 0 pass, 1 a parity failure, 2 wrong usage, 3 something is missing
    here (the message names the line that installs it) or stdout cannot be written to,
    4 inconclusive, 130 interrupted, 143 terminated.
    """
