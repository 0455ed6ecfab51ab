"""Every way into the package for a checkpoint, and what it says of one that it refuses.

Without torch there is no `verify`: it says so before it reads anything.
"""

import importlib.util
import os

import pytest
from click.testing import CliRunner

from jax_attn import models
from jax_attn.cli import main
from jax_attn.transfer import TransferError, layout_for, load_checkpoint

WAYS = {
    "inspect": ("inspect",),
    "port": ("port", "OUT", "--to", "flax"),
    "port --layout": (
        "port",
        "OUT",
        "--to",
        "flax",
        "--layout",
        "helpers.transfer.port_tables:RIGHT",
    ),
    "models.load": models.load,
    "layout_for": layout_for,
    "load_checkpoint": load_checkpoint,
}
if importlib.util.find_spec("torch") is not None:
    WAYS |= {"verify": ("verify",), "verify --attention": ("verify", "--attention")}


def refusal(way, source):
    """What a way in says of a checkpoint that it refuses. OUT is in the working directory."""
    call = WAYS[way]
    if callable(call):
        with pytest.raises(TransferError) as refused:
            call(source)
        return str(refused.value)
    command, *others = call
    done = CliRunner().invoke(main, [command, str(source), *others])
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)  # no traceback
    assert not os.path.lexists("OUT")
    return done.stderr
