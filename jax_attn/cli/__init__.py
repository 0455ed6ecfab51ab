"""`jax-attn`: one file a command, each imported when it is asked for."""

import importlib

import click

COMMANDS = ("verify", "doctor", "bench", "inspect", "port")
INTERRUPTED = 130  # as a shell has it


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        return importlib.import_module(f"jax_attn.cli.{name}").command

    def invoke(self, ctx: click.Context) -> object:
        """click's own answer to Ctrl-C is the status of a parity failure."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="jax-attn")
def main() -> None:
    """PyTorch attention in JAX/Flax, proved equal.

    \b
    Exit status: 0 pass, 1 a parity failure, 2 wrong usage, 3 something is missing
    here (the message names the line that installs it), 4 inconclusive, 130 interrupted.
    """
