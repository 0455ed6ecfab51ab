"""The modes of `jax-attn verify`, and the options that each accepts."""

import click
from click.core import ParameterSource

BUILT_IN = "the built-in cases"
# Mode → the options that it accepts in addition to --report and --json.
MODES = {
    BUILT_IN: (
        "--all",
        "--design",
        "--dtype",
        "--backend",
        "--implementation",
        "--mesh",
        "-k",
        "--all-tensors",
    ),
    "CHECKPOINT": (
        "--model",
        "--attention",
        "--layers",
        "--num-heads",
        "--num-kv-heads",
        "--all-tensors",
        "--explain",
    ),
    "--power": ("--design", "--dtype", "-k"),
    "--calibrate": ("--configurations", "--seed", "--dtype", "-k"),
}

SCOPES = ("--model", "--layers", "--attention")
"""Options that select a part of a checkpoint; they exclude one another."""


def expect_one_mode(context: click.Context) -> None:
    """Raise UsageError if two modes are combined, or if an option belongs to another mode."""
    named = [
        p.human_readable_name if isinstance(p, click.Argument) else p.opts[0]
        for p in context.command.params
        if p.name and context.get_parameter_source(p.name) is ParameterSource.COMMANDLINE
    ]
    modes = [name for name in MODES if name in named] or [BUILT_IN]
    if len(modes) > 1:
        raise click.UsageError(f"expected one of {', '.join(modes)}, got all of them")
    (mode,) = modes
    of_modes = {
        option: [other for other, options in MODES.items() if option in options] for option in named
    }
    problems = [
        f"{option}: goes with {' or '.join(others)}, not with {mode}"
        for option, others in of_modes.items()
        if others and mode not in others
    ]
    scopes = [scope for scope in SCOPES if scope in named]
    if len(scopes) > 1:
        problems.append(f"expected one of {', '.join(SCOPES)}, got {' and '.join(scopes)}")
    problems += [
        f"{option}: goes with --attention, not with {scopes[0]}"
        for option in ("--num-heads", "--num-kv-heads")
        if option in named and scopes and scopes[0] != "--attention"
    ]
    if problems:
        raise click.UsageError("\n".join(problems))
