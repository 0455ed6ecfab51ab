"""`jax-attn verify CHECKPOINT`: its whole model, some layers of it, or its attention alone."""

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from jax_attn.cli.status import WrongInput, missing, refuse
from jax_attn.cli.verify_outcome import Outcome

if TYPE_CHECKING:
    from jax_attn.transfer.families import Config


class Scope(NamedTuple):
    """What of a checkpoint is verified: its model, where there is one here, unless this says other.

    num_heads, num_kv_heads: of the attention, where no config.json beside the checkpoint has them.
    """

    model: bool = False
    layers: tuple[int, ...] = ()
    attention: bool = False
    num_heads: int | None = None
    num_kv_heads: int | None = None


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


def verify_checkpoint(path: Path, scope: Scope, *, explain: bool, shown: bool) -> Outcome:
    """Judge what the scope asks for, with a bar on stderr.

    explain: whether a result that does not pass has its explanation.
    """
    from jax_attn.transfer import TransferError
    from jax_attn.transfer.inspect.config import UnknownHeadsError, read_config

    try:
        config = read_config(path)
        if _is_whole(path, config, scope):
            return _verify_model(path, config or {}, scope.layers, explain=explain, shown=shown)
        return _verify_attention(path, config, scope, explain=explain, shown=shown)
    except UnknownHeadsError as error:
        raise click.UsageError(str(error)) from error
    except TransferError as error:
        refuse(error)
    except OSError as error:
        raise WrongInput(str(error)) from error
    except MemoryError as error:
        missing(f"{error}: verify some of its layers, with --layers 0, for example")


def _is_whole(path: Path, config: "Config | None", scope: Scope) -> bool:
    """Whether the model is verified; where it cannot be and was not asked for, why, on stderr."""
    from jax_attn.transfer import TransferError
    from jax_attn.transfer.families import model_problems

    asked = scope.model or bool(scope.layers)
    if scope.attention or (not asked and (scope.num_heads or scope.num_kv_heads)):
        return False
    problems = model_problems(config or {})
    if problems and asked:
        raise TransferError("verifying the whole model", problems)
    if problems:
        why = "; ".join(map(str, problems))
        click.echo(f"only the attention is verified, as there is no whole model: {why}", err=True)
    return not problems


def _verify_model(
    path: Path, config: "Config", layers: tuple[int, ...], *, explain: bool, shown: bool
) -> Outcome:
    from jax_attn.cli.common.progress import tracked
    from jax_attn.parity.checkpoint import whole

    if layers:
        names = whole.names_of_layers(layers)
        results = whole.verify_layers(path, config, layers, explain=explain)
    else:
        names = whole.names_of_whole()
        results = whole.verify_whole(path, config, explain=explain)
    batches = ([result] for result in results)
    return Outcome(names, shown).collect(tracked(batches, len(names)))


def _verify_attention(
    path: Path, config: "Config | None", scope: Scope, *, explain: bool, shown: bool
) -> Outcome:
    from jax_attn.cli.common.progress import tracked
    from jax_attn.parity.checkpoint.layer import verify_layer
    from jax_attn.parity.checkpoint.survey import survey
    from jax_attn.transfer import load_checkpoint
    from jax_attn.transfer.inspect.discover import pattern

    with load_checkpoint(path) as checkpoint:
        layers = survey(checkpoint, config, scope.num_heads, scope.num_kv_heads)
        for name, times in Counter(pattern(layer.name) for layer in layers).items():
            click.echo(f"found {name}, {times} times", err=True)
        batches = ([verify_layer(layer, checkpoint, explain=explain)] for layer in layers)
        names = [layer.name for layer in layers]
        return Outcome(names, shown).collect(tracked(batches, len(layers)))
