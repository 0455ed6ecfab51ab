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

_DEPTH = 2
"""How many keys deep the tensors of a trainer's file are searched, beyond the first."""

_ADVICE = re.compile(
    r"weights_only|add_safe_globals|arbitrary code|trust|^Please |^Check the doc|please file"
)
"""Patterns of torch's advice to read the file unsafely, which errors leave out."""


def tensors(path: Path, part: str | None) -> dict[str, Any]:
    """Return the torch tensors of a file by key, on the CPU, memory-mapped if torch can.

    part: the key of the tensors, if the file holds other values too. Values that are not tensors
    are returned unchanged. Raises TransferError if torch is missing or too old, if torch refuses
    the file, or if there are no tensors.
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
    if part is not None:
        held = _inside(path, held, part)
    if not isinstance(held, Mapping):
        kind = type(held).__name__
        raise file_error(path, f"expected a mapping of names to tensors, got {kind}")
    if odd := [key for key in held if not isinstance(key, str)]:
        raise file_error(path, f"expected strings as names of tensors, got {odd[:8]}")
    # A trainer may keep a tensor of its own, such as a loss, next to the entry of the weights.
    parts, beside = dict(_parts(held, torch.Tensor)), _count(held, torch.Tensor)
    if held and (not beside or max(parts.values(), default=0) > beside):
        inside = [f"{part}.{key}" if part else key for key in parts]
        options = " or ".join(f"--part {key}" for key in inside)
        calls = " or ".join(f"part={key!r}" for key in inside)
        hint = f"jax-attn inspect and port take {options}; in Python, {calls}"
        hint = hint if inside else ""
        text = f"expected names and tensors, got {_shown(held)}"
        raise file_error(path, f"{text}; tensors are under {inside}" if inside else text, hint)
    return dict(held)


def _parts(held: Mapping[str, Any], tensor: type, depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield the keys of mappings that hold tensors, such as "state.model", and their numbers."""
    for key, value in held.items():
        if not isinstance(key, str) or not isinstance(value, Mapping):
            continue
        if count := _count(value, tensor):
            yield key, count
        elif depth < _DEPTH:
            inside = _parts(value, tensor, depth + 1)
            yield from ((f"{key}.{inner}", count) for inner, count in inside)


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


def _inside(path: Path, held: Any, part: str) -> Any:
    """Return the value of a key, or of a key within a key if there is a dot between them."""
    keys = [str(key) for key in held] if isinstance(held, Mapping) else []
    if isinstance(held, Mapping) and part in held:
        return held[part]
    outer, _, inner = part.partition(".")
    if inner and isinstance(held, Mapping) and outer in held:
        return _inside(path, held[outer], inner)
    text = f"part: expected one of its keys, got {part!r}; they are {_shown(keys)}"
    raise file_error(path, text, nearest(part, keys))


def _shown(keys: Any) -> list[str]:
    return [str(key) for key in keys][:8]


def _reason(error: Exception) -> str:
    sentences = [s.strip() for s in re.split(r"\n|(?<=\.)\s", str(error)) if s.strip()]
    reasons = [sentence for sentence in sentences if not _ADVICE.search(sentence)]
    return " ".join(reasons or sentences[:1]) or type(error).__name__
