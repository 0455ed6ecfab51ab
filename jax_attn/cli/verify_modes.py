"""What `jax-attn verify` verifies, the options that go with it, and what it writes."""

from typing import NamedTuple

import click
from click.core import ParameterSource

from jax_attn.report.files import RESULT_FILES


class Mode(NamedTuple):
    """options: besides --report and --json. files: that --report gets."""

    options: tuple[str, ...]
    files: tuple[str, ...]


BUILT_IN = "the built-in cases"
NONE_LEFT = "no case is left by --design, --dtype and -k"
MODES = {
    BUILT_IN: Mode(("--design", "--dtype", "--backend", "--implementation", "-k"), RESULT_FILES),
    "CHECKPOINT": Mode(("--num-heads", "--num-kv-heads"), RESULT_FILES),
    "--power": Mode(("--design", "--dtype", "-k"), ("power.json",)),
    "--calibrate": Mode(("--configurations", "--seed", "--dtype", "-k"), ("calibration.json",)),
}


def expected_mode(context: click.Context) -> Mode:
    """The one that is asked for. Raises UsageError for two, and for options of others."""
    given = [
        p.human_readable_name if isinstance(p, click.Argument) else p.opts[0]
        for p in context.command.params
        if context.get_parameter_source(p.name) is ParameterSource.COMMANDLINE
    ]
    asked = [name for name in MODES if name in given] or [BUILT_IN]
    if len(asked) > 1:
        raise click.UsageError(f"expected one of {', '.join(asked)}, got all of them")
    (name,) = asked
    goes_with = {
        option: [other for other, mode in MODES.items() if option in mode.options]
        for option in given
    }
    problems = [
        f"{option}: goes with {' or '.join(modes)}, not with {name}"
        for option, modes in goes_with.items()
        if modes and name not in modes
    ]
    if problems:
        raise click.UsageError("\n".join(problems))
    return MODES[name]
