"""`jax-attn verify CHECKPOINT`: its whole model, some of its layers, or only its attention."""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from jax_attn.cli.status import WrongInput, missing, refuse
from jax_attn.cli.verifying.outcome import Outcome

if TYPE_CHECKING:
    from jax_attn.families import Config
    from jax_attn.transfer.problems import Problem

_ONLY_ATTENTION = (
    "only the attention weights are verified, not masks such as causality nor the rest of the "
    "model, because the whole model cannot be"
)

_OWN_PORT = "to verify a port of your own: jax-attn check FILE.py:FUNCTION"


class Scope(NamedTuple):
    """The part of a checkpoint to verify; by default the whole model, if its family is supported.

    num_heads, num_kv_heads: the numbers of heads, if the checkpoint's config.json does not give
    them.
    """

    model: bool = False
    layers: tuple[int, ...] = ()
    attention: bool = False
    num_heads: int | None = None
    num_kv_heads: int | None = None

    @property
    def asks_for_model(self) -> bool:
        """True if a whole model is required; then it is an error to fall back to its attention."""
        return self.model or bool(self.layers)


def expect_there(argument: str, path: Path) -> None:
    """Raise UsageError unless the path exists; for a name on the Hub, show how to download it."""
    if os.path.exists(path):
        return
    from jax_attn.transfer.files.local import download_hint

    text = f"{argument}: expected a file or a folder, but {path} does not exist"
    hint = download_hint(path)
    raise click.UsageError(f"{text}; nothing is downloaded: {hint}" if hint else text)


def expect_torch_side(path: Path) -> None:
    """Raise unless the path exists and is not the Flax side of a port, which lacks torch keys."""
    expect_there("CHECKPOINT", path)
    from jax_attn.transfer.files.port_folder import side_of

    if side_of(path) == "flax":
        first = f"convert it back first, to a new folder: jax-attn port {path} NEW --to torch"
        raise WrongInput(f"{path}: expected torch's side, got the Flax side of a port; {first}")


def verify_checkpoint(path: Path, scope: Scope, *, explain: bool, shown: bool) -> Outcome:
    """Judge the part of the checkpoint that the scope names, with a progress bar on stderr.

    explain: whether to explain results that do not pass. shown: whether to print each result as
    soon as it is judged.
    """
    from jax_attn.families.whole import unusable
    from jax_attn.parity.run.inputs_and_runs import RaisedError
    from jax_attn.porting.inspect.config import UnknownHeadsError
    from jax_attn.transfer import TransferError
    from jax_attn.transfer.files.port_folder import read_config
    from jax_attn.translate import TranslationError

    try:
        config = read_config(path)
        if unfit := unusable(config or {}):
            raise TransferError("reading the config", unfit)
        problems = _model_problems(path, config, scope)
        options: Any = {"explain": explain, "shown": shown}
        if problems is None:
            return _verify_attention(path, config, scope, **options)
        if not problems and config is not None:
            return _verify_model(path, config, scope, **options)
        if scope.asks_for_model:
            raise TransferError("verifying the whole model", problems)
        why = "; ".join(map(str, problems))
        if config is not None and _is_found(path):
            try:
                return _verify_translated(path, why, **options)
            except (TransferError, TranslationError, RaisedError, MemoryError) as error:
                why = f"{why}; and it cannot be translated: {error}"
        why = f"{_ONLY_ATTENTION}: {why}"
        click.echo(why, err=True)
        return _verify_attention(path, config, scope, **options, notes=(why,))
    except UnknownHeadsError as error:
        raise click.UsageError(str(error)) from error
    except TransferError as error:
        refuse(error)
    except OSError as error:
        raise WrongInput(str(error)) from error
    except MemoryError as error:
        fewer = "" if scope.layers else "; verify single layers: --layers 0, for example"
        missing(f"{error}{fewer}")


def _model_problems(path: Path, config: "Config | None", scope: Scope) -> "list[Problem] | None":
    """Return why the whole model cannot be verified, or None if only attention is asked for."""
    from jax_attn.families import model_problems
    from jax_attn.transfer.problems import Problem

    if scope.attention or (not scope.asks_for_model and (scope.num_heads or scope.num_kv_heads)):
        return None
    if config is None:
        return [Problem("file", str(path), "expected a config.json beside the tensors, got none")]
    if not _is_found(path):
        text = "expected a folder, because transformers does not look for a file of this name"
        return [Problem("file", str(path), text, f"pass {path.parent}")]
    problems = model_problems(config)
    return problems[:-1] + [p if p.hint else p._replace(hint=_OWN_PORT) for p in problems[-1:]]


def _is_found(path: Path) -> bool:
    """Return whether transformers looks for a checkpoint of this name."""
    from jax_attn.transfer.files.checkpoint import USUAL

    return path.is_dir() or path.name in USUAL


def _verify_translated(path: Path, why: str, *, explain: bool, shown: bool) -> Outcome:
    """Judge the translation of the whole model. why: why `jax_attn.models` does not have it."""
    from jax_attn.porting.verify.translated import NAME, verify_translated

    click.echo(f"the whole model is translated, and its translation verified: {why}", err=True)
    result = verify_translated(path, explain=explain)
    return Outcome([NAME], shown).collect(each for each in [result])


def _verify_model(
    path: Path, config: "Config", scope: Scope, *, explain: bool, shown: bool
) -> Outcome:
    from jax_attn.cli.common.progress import tracked
    from jax_attn.porting.verify import whole

    if layers := scope.layers:
        names = whole.names_of_layers(layers)
        results = whole.verify_layers(path, config, layers, explain=explain)
    else:
        names = whole.names_of_whole()
        results = whole.verify_whole(path, config, explain=explain)
    batches = ([result] for result in results)
    return Outcome(names, shown).collect(tracked(batches, len(names)))


def _verify_attention(
    path: Path,
    config: "Config | None",
    scope: Scope,
    *,
    explain: bool,
    shown: bool,
    notes: tuple[str, ...] = (),
) -> Outcome:
    """Find the attention layers and judge each of them.

    notes: notes that are added to every result.
    """
    from jax_attn.cli.common.progress import tracked
    from jax_attn.parity.judge.finding import findings
    from jax_attn.porting.inspect.discover import pattern
    from jax_attn.porting.verify.layer import verify_layer
    from jax_attn.porting.verify.survey import survey
    from jax_attn.transfer import load_checkpoint

    with load_checkpoint(path) as checkpoint:
        layers = survey(checkpoint, config, scope.num_heads, scope.num_kv_heads)
        for name, times in Counter(pattern(layer.name) for layer in layers).items():
            click.echo(f"found {name}, {times} times", err=True)
        results = (verify_layer(layer, checkpoint, explain=explain) for layer in layers)
        about = findings("about-checkpoint", notes)
        batches = ([replace(r, notes=(*about, *r.notes))] for r in results)
        names = [layer.name for layer in layers]
        return Outcome(names, shown).collect(tracked(batches, len(layers)))
