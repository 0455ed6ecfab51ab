"""torch.save files, read by torch itself and only with `weights_only=True`.

Only this file of the package imports torch, and only when it reads such a file.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_attn.transfer.problems import file_error, nearest

SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

_NEEDED = (2, 10)
"""Earlier versions could run code from a file in spite of `weights_only=True`."""
_INSTALL = f"pip install --upgrade 'torch>={_NEEDED[0]}.{_NEEDED[1]}'"

_DEPTH = 3
"""The number of keys of the longest part that is searched for tensors, such as "a.b.c"."""

_ADVICE = re.compile(
    r"weights_only|add_safe_globals|arbitrary code|trust|^Please |^Check the doc|please file"
)
"""Patterns of torch's advice to read the file unsafely, which errors leave out."""


def tensors(path: Path, part: str | None) -> dict[str, Any]:
    """Return the torch tensors of a file by key, on the CPU, memory-mapped if torch can.

    part: the key of the tensors, if the file holds other values too, or keys within keys, with dots
    between them; "" for the file itself, which is also None's if its tensors have the names of a
    module's. Values that are not tensors are returned unchanged. Raises TransferError if torch is
    missing or too old, if torch refuses the file, or if there are no tensors.
    """
    torch = _torch(path)
    try:
        with path.open("rb") as file:
            zipped = file.read(4) == b"PK\x03\x04"
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # torch may raise anything for a file of any content
        size = path.stat().st_size
        text = f"torch cannot read this pickle ({size} bytes) as weights only: {_reason(error)}"
        raise file_error(path, text) from error
    if part:
        held = _inside(path, held, part, torch.Tensor)
    if not isinstance(held, Mapping):
        kind = type(held).__name__
        raise file_error(path, f"expected a mapping of names to tensors, got {kind}")
    if odd := [key for key in held if not isinstance(key, str)]:
        raise file_error(path, f"expected strings as names of tensors, got {odd[:8]}")
    parts, beside = dict(_parts(held, torch.Tensor)), _count(held, torch.Tensor)
    if held and (not beside or (part is None and _is_beside(held, parts, torch.Tensor))):
        inside = [f"{part}.{key}" if part else key for key in parts]
        inside += [""] if beside else []
        options = " or ".join(f"--part {key or repr('')}" for key in inside)
        calls = " or ".join(f"part={key!r}" for key in inside)
        hint = f"jax-attn inspect and port take {options}; in Python, {calls}"
        hint = hint if inside else ""
        text = f"expected names and tensors, got {_shown(held)}"
        raise file_error(path, f"{text}; tensors are under {inside}" if inside else text, hint)
    return dict(held)


def _parts(held: Mapping[str, Any], tensor: type, depth: int = 1) -> Iterator[tuple[str, int]]:
    """Yield each part that holds tensors, such as "state.model", and the number of its tensors."""
    for key, value in held.items():
        if not isinstance(key, str) or not isinstance(value, Mapping):
            continue
        inside = dict(_parts(value, tensor, depth + 1)) if depth < _DEPTH else {}
        count = _count(value, tensor)
        if count and not _is_beside(value, inside, tensor):
            yield key, count
        else:
            yield from ((f"{key}.{inner}", number) for inner, number in inside.items())


def _is_beside(held: Mapping[str, Any], parts: Mapping[str, int], tensor: type) -> bool:
    """Return whether a file's own tensors are a trainer's, such as a loss, and a part has more.

    Tensors of modules within a module have a dot in their names, and a trainer's have none.
    """
    own = [key for key, value in held.items() if isinstance(value, tensor)]
    return max(parts.values(), default=0) > len(own) and not any("." in key for key in own)


def _count(held: Mapping[str, Any], tensor: type) -> int:
    return sum(isinstance(value, tensor) for value in held.values())


def _torch(path: Path) -> Any:
    try:
        import torch
    except ImportError as error:
        text = f"a {path.suffix} file is a pickle, which only torch reads; torch is not installed"
        raise file_error(path, text, _INSTALL) from error
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < _NEEDED:
        text = f"reading a pickle needs torch 2.10 or later, got {torch.__version__}"
        raise file_error(path, text, _INSTALL)
    return torch


def _inside(path: Path, held: Any, part: str, tensor: type) -> Any:
    """Return the value of a key, or of keys within keys with dots between them."""
    if found := _found(held, part):
        return found[0]
    keys = [str(key) for key in held] if isinstance(held, Mapping) else []
    parts = [*_parts(held, tensor)] if keys else []
    text = f"part: expected one of its keys, got {part!r}; they are {_shown(keys)}"
    raise file_error(path, text, nearest(part, [*keys, *dict(parts)]))


def _found(held: Any, part: str) -> list[Any]:
    """Return the value of a part, alone in a list, or []. A key may itself have dots."""
    if not isinstance(held, Mapping):
        return []
    if part in held:
        return [held[part]]
    words = part.split(".")
    cuts = ((".".join(words[:n]), ".".join(words[n:])) for n in range(1, len(words)))
    inner = (_found(held[first], rest) for first, rest in cuts if first in held)
    return next(filter(None, inner), [])


def _shown(keys: Any) -> list[str]:
    return [str(key) for key in keys][:8]


def _reason(error: Exception) -> str:
    sentences = [s.strip() for s in re.split(r"\n|(?<=\.)\s", str(error)) if s.strip()]
    reasons = [sentence for sentence in sentences if not _ADVICE.search(sentence)]
    return " ".join(reasons or sentences[:1]) or type(error).__name__
