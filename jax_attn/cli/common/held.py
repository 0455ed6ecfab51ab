"""The options that say where the tensors of a trainer's file are, and under which prefix."""

import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

import click


class Held(NamedTuple):
    """How a file holds its tensors.

    part: the key of the tensors in a pickle that holds other values too, "" for the file itself, or
    None. strip: a prefix
    of the keys, or "".
    """

    part: str | None
    strip: str

    @property
    def options(self) -> str:
        """The options of a command that reads the same tensors, each after a space."""
        given = {"--part": self.part, "--strip": self.strip or None}
        said = {name: value for name, value in given.items() if value is not None}
        return "".join(f" {name} {shlex.quote(value)}" for name, value in said.items())

    @property
    def arguments(self) -> str:
        """The arguments of `models.load` that read the same tensors, each after a comma."""
        given = {"part": self.part, "strip": self.strip or None}
        return "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)


def held_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--part` and `--strip` to a command."""
    part = click.option(
        "--part",
        metavar="KEY",
        help="The key of the tensors in a trainer's pickle, such as state_dict, or state.model for "
        "a key within a key.",
    )
    strip = click.option(
        "--strip",
        default="",
        metavar="PREFIX",
        help="Strip this prefix from the keys; a wrapper's name, such as _orig_mod, from within, "
        "too.",
    )
    return part(strip(command))
