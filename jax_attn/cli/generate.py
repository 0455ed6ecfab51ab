"""`jax-attn generate`: let a checkpoint's model continue a text, or answer turn by turn."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from jax_attn.cli.status import WrongInput, expect_installed, missing, refuse
from jax_attn.cli.verifying.checkpoint import expect_there
from jax_attn.environment import settle_platforms


@click.command("generate")
@click.argument("checkpoint", metavar="CKPT", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--chat", is_flag=True, help="Answer by the tokenizer's chat template.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="The most tokens to generate in each turn, if there is room for as many.",
)
@click.option(
    "--length",
    type=click.IntRange(1, 2**20),
    default=2048,
    show_default=True,
    help="The most tokens of a text, or of a whole conversation, if the model takes as many.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    help="Divide the logits; 0 takes the likeliest token.",
)
@click.option("--top-k", type=click.IntRange(1), help="Draw from the k likeliest tokens.")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Draw from the likeliest tokens that add up to p.",
)
@click.option(
    "--min-p",
    type=click.FloatRange(0, 1),
    help="Draw from tokens of this share of the likeliest.",
)
@click.option(
    "--repetition-penalty",
    type=click.FloatRange(0, min_open=True),
    help="Make the text's own tokens rarer.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Draw other tokens.",
)
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

    An encoder-decoder reads PROMPT, and what its decoder generates is printed without it.

    CKPT is a folder as transformers writes it. Without PROMPT the lines of stdin are read that are
    not blank, each a text of its own, or a turn of one conversation with --chat, of which only what
    is new is computed. The text goes to stdout as it comes, and how fast it came to stderr.

    How tokens are chosen is as generation_config.json says, unless an option says otherwise; if
    neither does, the likeliest is taken. Compiled programs are kept in JAX_COMPILATION_CACHE_DIR,
    which is ~/.cache/jax-attn/programs unless you set it.

    Exit status: 2 if the checkpoint, its tokenizer, a text or an option cannot be used; 3 if
    transformers, which has the tokenizers, is not installed.
    """
    expect_installed("transformers", "has the tokenizers", "hf")
    expect_there("CKPT", checkpoint)
    settle_platforms()
    _keep_programs()
    import jax
    import numpy as np

    from jax_attn import models
    from jax_attn.attention import ArgumentError
    from jax_attn.transfer import TransferError

    tokenizer = _tokenizer(checkpoint, chat)
    try:
        model = models.load(checkpoint)
        reads_source = isinstance(model, models.EncoderDecoder)
        if reads_source and chat:
            raise WrongInput("--chat: expected a decoder's checkpoint, got an encoder-decoder's")
        talk: Any = models.Chat(model, length=length) if isinstance(model, models.Model) else model
        messages: list[dict[str, str]] = []
        for n, turn in enumerate(_turns(prompt)):
            messages.append({"role": "user", "content": turn})
            ids = _ids(tokenizer, turn, messages if chat else None)
            how: Any = {**numbers, "key": jax.random.fold_in(jax.random.key(seed), n)}
            most = length if reads_source else talk.length
            if len(ids) > most:
                raise WrongInput(f"expected at most {most} tokens, got {len(ids)}")
            # What the answer follows. The last token is not read.
            before = [] if reads_source else ids
            count = min(max_new_tokens, most + 1 - max(1, len(before)))
            tokens = np.array([ids], np.int32)
            pieces = partial(talk.stream, tokens, None, count, every=_EVERY, **how)
            said = _answer(pieces, tokenizer, before, chat, model.generation.ends)
            messages.append({"role": "assistant", "content": said})
    except TransferError as error:
        refuse(error)
    except ArgumentError as error:
        text = re.sub(r"^\w+\.stream: ", "", str(error))
        raise WrongInput(_with_options(text, (*numbers, "length"))) from error
    except OSError as error:
        raise WrongInput(str(error)) from error


_EVERY = 4
"""The tokens that are shown together: a program runs for each such piece."""


def _answer(
    pieces: Callable[[], Iterator[Any]],
    tokenizer: Any,
    ids: list[int],
    is_chat: bool,
    ends: Sequence[int],
) -> str:
    """Print the pieces that follow these tokens, as they come, and return their text."""
    import numpy as np

    # What follows is decoded with what it follows, which decides whether a space is between.
    before = shown = tokenizer.decode(ids, skip_special_tokens=True)
    found, begun, first = list[int](), time.perf_counter(), 0.0
    for piece in pieces():
        if not found:
            first = time.perf_counter() - begun
            click.echo("" if is_chat else before, nl=False)
        found += np.asarray(piece)[0].tolist()
        if found[-1] < 0:
            raise WrongInput("the model's logits are NaN, so that no token follows")
        # Half a character comes as \ufffd until its other bytes are there.
        text = tokenizer.decode(ids + found, skip_special_tokens=True).rstrip("\ufffd")
        new = text[len(shown) :]
        click.echo(new.lstrip() if is_chat and shown == before else new, nl=False)
        sys.stdout.flush()
        shown = max(shown, text, key=len)
    whole = tokenizer.decode(ids + found, skip_special_tokens=True)
    click.echo(whole[len(shown) :])
    ended = (n for n, token in enumerate(found, 1) if token in ends)
    _tell_speed(next(ended, len(found)), first, time.perf_counter() - begun - first)
    return whole[len(before) :].strip()


def _tell_speed(count: int, first: float, rest: float) -> None:
    """Say how long the first tokens took, which may have been compiled, and how fast more came."""
    text = f"{count} tokens, the first {min(count, _EVERY)} in {first:.1f} s"
    if count > _EVERY:
        text += f", then {(count - _EVERY) / rest:.1f} a second"
    click.echo(text, err=True)


def _with_options(message: str, arguments: Sequence[str]) -> str:
    """Return a message about arguments of these names in the spelling of the command's options."""
    named = rf"(?<!generation: )\b({'|'.join(arguments)})(?=: |=)"
    return re.sub(named, lambda found: "--" + found[1].replace("_", "-"), message)


def _turns(prompt: str | None) -> Iterator[str]:
    """Return the prompt, or else each line of stdin that is not blank."""
    lines = sys.stdin.buffer if prompt is None else [os.fsencode(prompt)]
    texts = (line.decode(errors="replace").rstrip("\r\n") for line in lines)
    return (text for text in texts if prompt is not None or text.strip())


_OF_TOKENIZERS = ("token*", "vocab*", "merges*", "*.model", "*.tiktoken", "tekken*", "*.bpe")
"""Patterns of the files of tokenizers."""


def _tokenizer(checkpoint: Path, chat: bool) -> Any:
    """Return the tokenizer of a checkpoint's folder; with `chat` it must have a template."""
    from transformers import AutoTokenizer

    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    # Without any, transformers makes an empty tokenizer for some models, such as T5.
    if not any(path for pattern in _OF_TOKENIZERS for path in folder.glob(pattern)):
        raise WrongInput(f"{folder}: expected a tokenizer, got none of its files")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ImportError as error:  # a kind of tokenizer that needs another package
        missing(str(error))
    except Exception as error:  # tokenizers raises nothing more special
        text = f"{folder}: expected a tokenizer that transformers reads: {_first_line(error)}"
        raise WrongInput(text) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes of no file
        raise WrongInput(f"{folder}: expected a tokenizer, got none with other than special tokens")
    if chat and tokenizer.chat_template is None:
        raise WrongInput(f"{folder}: expected a tokenizer with a chat template for --chat")
    return tokenizer


def _ids(tokenizer: Any, turn: str, messages: list[dict[str, str]] | None) -> list[int]:
    """Return the tokens of a text, or of a whole conversation by the template."""
    if messages is None:
        ids = tokenizer(turn)["input_ids"]
    else:
        try:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # what the template itself raises
            text = f"the chat template takes no such conversation: {_first_line(error)}"
            raise WrongInput(text) from error
    if not ids:
        raise WrongInput(f"PROMPT: expected a text of at least one token, got {turn!r}")
    return ids


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0]


def _keep_programs() -> None:
    """Let JAX keep compiled programs between runs, unless the user has said where."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(home, "jax-attn", "programs")
