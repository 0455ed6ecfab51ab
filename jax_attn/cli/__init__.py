"""`jax-attn`: each command has a file of its own, which is imported only when it is run."""

import contextlib
import gc
import importlib
import os
import sys
from typing import Any

import click

from jax_attn.cli.common.signals import Signals
from jax_attn.cli.status import Exit

COMMANDS = (
    *("check", "translate", "capture", "verify", "power", "calibrate"),
    *("doctor", "bench", "inspect", "port", "generate"),
)


class _Lazy(click.Group):
    signals = Signals()

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        return importlib.import_module(f"jax_attn.cli.{name}").command

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line; escape unprintable text, and report a full or closed output.

        Signals exit with a shell's statuses. click itself would show a traceback, and exit after
        Ctrl-C with the status of a parity failure.
        """
        self.signals = Signals()
        # By default Python looks for garbage 600 times while both frameworks are imported, which
        # takes a quarter of that time.
        gc.set_threshold(10_000)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        try:
            with self.signals.raised():
                return super().main(*args, **extra)
        except OSError as error:
            if error.filename is not None:  # a file's error, not a stream's
                raise
            _silence(sys.stdout)
            with contextlib.suppress(OSError):
                click.echo(f"Error: output cannot be written: {error.strerror}", err=True)
            sys.exit(Exit.ENVIRONMENT)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with self.signals.told():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> object:
        with self.signals.told():
            return super().invoke(ctx)


def _silence(stream: Any) -> None:
    """Discard what the stream still holds; on exit, Python would try and fail to write it again."""
    with contextlib.suppress(OSError):  # a stream in memory has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="jax-attn")
def main() -> None:
    """Port attention between PyTorch and JAX/Flax, and verify the port.

    Every command exits with status 0 if everything passes, 1 if something fails, 2 for wrong
    usage, 3 if a package is missing (the message shows how to install it) or stdout cannot be
    written to, 4 if the outcome is inconclusive, 70 if jax-attn itself fails, 130 if it is
    interrupted and 143 if it is terminated.
    """
