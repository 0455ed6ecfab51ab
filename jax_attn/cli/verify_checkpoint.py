"""`jax-attn verify CHECKPOINT`: the attention layers found in a file or folder."""

import os
from collections import Counter
from pathlib import Path

import click

from jax_attn.cli.status import WrongInput
from jax_attn.cli.verify_outcome import Outcome


def expect_torch_side(path: Path) -> None:
    """Raise unless the path exists and is not the Flax side of a port, which has no torch keys."""
    if not os.path.exists(path):
        raise click.UsageError(
            f"CHECKPOINT: expected a file or a folder, but {path} does not exist"
        )
    from jax_attn.transfer.port.files import side_of

    if side_of(path) == "flax":
        first = f"convert it back first, to a new folder: jax-attn port {path} NEW --to torch"
        raise WrongInput(f"{path}: expected torch's side, got the Flax side of a port; {first}")


def verify_checkpoint(
    path: Path, num_heads: int | None, num_kv_heads: int | None, *, explain: bool, shown: bool
) -> Outcome:
    """Judge every attention layer in a checkpoint, with a bar on stderr.

    num_heads, num_kv_heads: where no config.json beside the checkpoint has them. explain: as for
    `verify_layer`.
    """
    from jax_attn.cli.common.progress import tracked
    from jax_attn.parity.checkpoint.layer import verify_layer
    from jax_attn.parity.checkpoint.survey import survey
    from jax_attn.transfer import TransferError, load_checkpoint
    from jax_attn.transfer.inspect.config import UnknownHeadsError, read_config
    from jax_attn.transfer.inspect.discover import pattern

    try:
        with load_checkpoint(path) as checkpoint:
            layers = survey(checkpoint, read_config(path), num_heads, num_kv_heads)
            for name, times in Counter(pattern(layer.name) for layer in layers).items():
                click.echo(f"found {name}, {times} times", err=True)
            batches = ([verify_layer(layer, checkpoint, explain=explain)] for layer in layers)
            names = [layer.name for layer in layers]
            judged = tracked(batches, len(layers))
            return Outcome(names, shown).collect(judged)
    except UnknownHeadsError as error:
        raise click.UsageError(str(error)) from error
    except (TransferError, OSError) as error:
        raise WrongInput(str(error)) from error
