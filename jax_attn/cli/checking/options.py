"""The options that give arguments of a check or of a capture, and how they are typed."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from jax_attn.dtypes import DTYPES
from jax_attn.parity.run import TRANSFORMS


def _words(context: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Parse names with commas between them, as a callback."""
    names = tuple((value or "").split(",")) if value else ()
    if unknown := [name for name in names if name not in TRANSFORMS]:
        expected = f"expected some of {', '.join(TRANSFORMS)}, with commas between them"
        raise click.BadParameter(f"{expected}, got {', '.join(unknown)}")
    return names


OPTIONS = {
    # argument of check or check_training -> the option that gives it
    "dtype": click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        help="The dtype of both modules. The function takes it as its argument `dtype`, if it has "
        "one. The default is the reference's.",
    ),
    "gradients": click.option(
        "--gradients/--no-gradients", default=None, help="Whether to compare gradients."
    ),
    "transforms": click.option(
        "--transforms",
        metavar="eager,jit,...",
        callback=_words,
        help=f"Run the port under these: {', '.join(TRANSFORMS)}.",
    ),
    "seed": click.option("--seed", type=click.IntRange(min=0), help="The seed of the cotangents."),
    "strict": click.option(
        "--strict/--no-strict", default=None, help="Whether notes make the verdict INCONCLUSIVE."
    ),
    "parameters": click.option(
        "--parameters",
        multiple=True,
        metavar="PATTERN",
        help="Compare only the gradients of parameters whose names in the reference match (* is "
        "any text); may be repeated.",
    ),
    "steps": click.option(
        "--steps", type=click.IntRange(min=1), help="With --training: the number of updates."
    ),
}


def arguments(names: Iterable[str]) -> Callable[[Any], Any]:
    """Return a decorator that gives a command these of `OPTIONS`."""

    def decorated(command: Any) -> Any:
        for name in reversed([*names]):
            command = OPTIONS[name](command)
        return command

    return decorated


def typed(options: dict[str, Any]) -> Iterator[str]:
    """Yield the words that give these options on the command line."""
    for name, value in options.items():
        if isinstance(value, bool):
            yield f"--{'' if value else 'no-'}{name}"
        elif name == "parameters":
            yield from (word for pattern in value for word in (f"--{name}", pattern))
        else:
            yield from (f"--{name}", ",".join(value) if name == "transforms" else str(value))
