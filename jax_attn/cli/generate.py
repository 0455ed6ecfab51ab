"""`jax-attn generate`: let a checkpoint's model continue a text, or answer turn by turn."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jax_attn.cli.status import WrongInput, expect_installed, refuse
from jax_attn.cli.verifying.checkpoint import expect_there
from jax_attn.environment import settle_platforms

if TYPE_CHECKING:
    from jax_attn.models import Chat


@click.command("generate")
@click.argument("checkpoint", metavar="CKPT", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--chat", is_flag=True, help="Answer by the tokenizer's chat template.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="The most tokens to generate, in each turn.",
)
@click.option(
    "--length",
    type=click.IntRange(1),
    default=2048,
    show_default=True,
    help="The most tokens of a text, or of a whole conversation.",
)
@click.option("--temperature", type=float, help="Divide the logits; 0 takes the likeliest token.")
@click.option("--top-k", type=click.IntRange(1), help="Draw from the k likeliest tokens.")
@click.option("--top-p", type=float, help="Draw from the likeliest tokens that add up to p.")
@click.option("--min-p", type=float, help="Draw from tokens of this share of the likeliest.")
@click.option("--repetition-penalty", type=float, help="Make the text's own tokens rarer.")
@click.option("--seed", type=int, default=0, show_default=True, help="Draw other tokens.")
def command(
    checkpoint: Path,
    prompt: str | None,
    chat: bool,
    max_new_tokens: int,
    length: int,
    seed: int,
    **numbers: float | None,
) -> None:
    """Continue PROMPT with the model of a checkpoint, by the tokenizer in its folder.

    CKPT is a folder as transformers writes it. Without PROMPT the lines of stdin are read, each a
    text of its own, or a turn of one conversation with --chat, of which only what is new is
    computed. The text goes to stdout as it comes, and how fast it came to stderr.

    What the options leave open is as generation_config.json says; without one, the likeliest token
    is taken. Compiled programs are kept in JAX_COMPILATION_CACHE_DIR, which is
    ~/.cache/jax-attn/programs unless you set it.

    Exit status: 2 if the checkpoint, its tokenizer or an option cannot be used; 3 if transformers,
    which has the tokenizers, is not installed.
    """
    expect_installed("transformers", "has the tokenizers", "hf")
    expect_there("CKPT", checkpoint)
    settle_platforms()
    _keep_programs()
    import jax

    from jax_attn import models
    from jax_attn.attention import ArgumentError
    from jax_attn.transfer import TransferError

    tokenizer = _tokenizer(checkpoint, chat)
    try:
        model = models.load(checkpoint)
        talk = models.Chat(model, length=min(length, model.most_tokens or length))
        how = {**numbers, "key": jax.random.key(seed)}
        _answer(talk, tokenizer, _turns(prompt), chat, max_new_tokens, how)
    except TransferError as error:
        refuse(error)
    except ArgumentError as error:
        raise WrongInput(str(error)) from error


def _answer(
    talk: "Chat",
    tokenizer: Any,
    turns: Iterable[str],
    is_chat: bool,
    count: int,
    how: dict[str, Any],
) -> None:
    """Print what follows each turn, as it comes."""
    import numpy as np

    said: list[dict[str, str]] = []
    for turn in turns:
        if is_chat:
            said.append({"role": "user", "content": turn})
            ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        else:
            ids = tokenizer(turn)["input_ids"]
        # What follows is decoded with what it follows, which decides whether a space is between.
        before = shown = tokenizer.decode(ids, skip_special_tokens=True)
        click.echo("" if is_chat else before, nl=False)
        tokens, found, times = np.array([ids], np.int32), [], [time.perf_counter()]
        for piece in talk.stream(tokens, None, count, every=_EVERY, **how):
            found += np.asarray(piece)[0].tolist()
            times.append(time.perf_counter())
            text = tokenizer.decode(ids + found, skip_special_tokens=True)
            if not text.endswith("\ufffd"):  # half a character: its other bytes come later
                new = text[len(shown) :]
                click.echo(new.lstrip() if is_chat and shown == before else new, nl=False)
                sys.stdout.flush()
                shown = text
        click.echo()
        said.append({"role": "assistant", "content": shown[len(before) :].strip()})
        _tell_speed(len(ids), len(found), times)


def _tell_speed(read: int, generated: int, times: list[float]) -> None:
    """Say how long the first tokens took, which may have been compiled, and how fast more came."""
    text = f"{read} tokens read, and the first {_EVERY} generated, in {times[1] - times[0]:.1f} s"
    if generated > _EVERY:
        speed = (generated - _EVERY) / (times[-1] - times[1])
        text += f"; then {speed:.1f} tokens a second"
    click.echo(text, err=True)


_EVERY = 4
"""The tokens that are shown together: a program runs for each such piece."""


def _turns(prompt: str | None) -> Iterator[str]:
    """Return the prompt, or else each line of stdin that is not blank."""
    if prompt is not None:
        return iter([prompt])
    return (line.rstrip("\n") for line in sys.stdin if line.strip())


def _tokenizer(checkpoint: Path, chat: bool) -> Any:
    """Return the tokenizer of a checkpoint's folder; with `chat` it must have a template."""
    from transformers import AutoTokenizer

    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        why = str(error).splitlines()[0]
        raise WrongInput(
            f"{folder}: expected a tokenizer that transformers reads: {why}"
        ) from error
    if chat and tokenizer.chat_template is None:
        raise WrongInput(f"{folder}: expected a tokenizer with a chat template for --chat")
    return tokenizer


def _keep_programs() -> None:
    """Let JAX keep compiled programs between runs, unless the user has said where."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(home, "jax-attn", "programs")))
