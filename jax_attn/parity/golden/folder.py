"""The folder of a golden reference: plain data and arrays, whole or not there, with one digest.

golden.json           {"format", "arrays": {name: [shape, dtype, sha256]}, "content", "digest"}
arrays.safetensors    the arrays

The digest is the SHA-256 of the rest of golden.json, and so of every number and word.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from jax_attn.parity.checking.digests import Digest
from jax_attn.parity.judge.text import joined, quoted
from jax_attn.transfer import TransferError, load_checkpoint, save_checkpoint
from jax_attn.transfer.files.json_file import read_json
from jax_attn.transfer.files.port_folder import refused_target
from jax_attn.transfer.files.staging import staged

FORMAT = 1
"""The format that is written. All up to it are read."""
_DATA, _ARRAYS = "golden.json", "arrays.safetensors"
_AGAIN = "copy the folder again from where it was captured, or capture the reference again"


class FolderContents:
    """Plain data and its arrays, as they are written. document: golden.json without its digest."""

    def __init__(self, document: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        self.document, self.arrays = document, arrays

    @classmethod
    def of(cls, data: Any, arrays: Mapping[str, np.ndarray]) -> Self:
        """Take the digests of the arrays."""
        digests = {name: list(Digest.of(a)) for name, a in arrays.items()}
        return cls({"format": FORMAT, "arrays": digests, "content": data}, arrays)

    @cached_property
    def digest(self) -> str:
        """The digest of everything."""
        return _digest(self.document)

    @property
    def _text(self) -> str:
        return json.dumps({**self.document, "digest": self.digest}, allow_nan=False) + "\n"

    @property
    def size(self) -> int:
        """The bytes that `write` writes, apart from the header of the arrays."""
        return sum(a.nbytes for a in self.arrays.values()) + len(self._text.encode())

    def write(self, folder: Path) -> None:
        """Write the folder, which must not exist: whole, or not at all.

        Raises TransferError if it exists or the disk refuses.
        """
        expect_new(folder)
        with staged(folder) as partial:
            save_checkpoint(partial / _ARRAYS, self.arrays)
            (partial / _DATA).write_text(self._text, "utf-8")


def expect_new(folder: Path) -> None:
    """Raise TransferError unless a folder of this name can be written."""
    if problems := refused_target(folder):
        raise TransferError("golden reference, nothing written", problems)


def read(folder: Path, expect_digest: str | None, *, in_memory: bool = False) -> FolderContents:
    """Return what a folder holds, all of it compared with its digest.

    in_memory: copy the arrays first, which otherwise change with the file.

    Raises ValueError, which says all that is wrong with the folder.
    """
    wanted = None if expect_digest is None else as_digest(expect_digest)
    if got := _why_no_folder(folder):
        raise ValueError(
            f"{folder}: expected a folder with {_DATA} and {_ARRAYS}, got {got}; {_AGAIN}"
        )
    try:
        document = read_json(folder / _DATA)
        version, digest = document["format"], document.pop("digest")
        if type(version) is not int or type(digest) is not str:
            raise TypeError(f"format {version!r}, digest {digest!r}")
        listed = document["arrays"] if version <= FORMAT else {}
        digests = {name: Digest(tuple(shape), *rest) for name, (shape, *rest) in listed.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        text = f"expected a golden reference, got {error!r}"
        raise ValueError(f"{folder / _DATA}: {text}; {_AGAIN}") from error
    if version > FORMAT:
        raise ValueError(
            f"{folder}: expected format {FORMAT} or older, got {version}, which a newer jax-attn "
            "wrote; install that version or a later one"
        )
    if digest != _digest(document):
        raise ValueError(f"{folder / _DATA}: was changed after it was written; {_AGAIN}")
    if wanted not in (None, digest):
        raise ValueError(
            f"{folder}: expected the golden reference with digest {wanted}, got {digest}: "
            "it was captured again, or of another reference, inputs or options"
        )
    try:
        with load_checkpoint(folder / _ARRAYS) as held:
            arrays = {name: np.array(held[name]) if in_memory else held[name] for name in held}
    except TransferError as error:
        raise ValueError(f"{folder / _ARRAYS}: cannot be read; {_AGAIN}\n{error}") from error
    if problems := list(_unlike(arrays, digests)):
        raise ValueError(f"{folder / _ARRAYS}: {'; '.join(problems)}; {_AGAIN}")
    return FolderContents(document, arrays)


def as_digest(text: str) -> str:
    """Return a digest as it is written, in lower case. Raises ValueError if it is none."""
    digest = str(text).strip().lower()
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError(
            f"expect_digest: expected 64 hexadecimal digits, as jax-attn capture prints them, got "
            f"{text!r}"
        )
    return digest


def _why_no_folder(folder: Path) -> str:
    """Return what is there instead of a folder with both files; "" if they are there."""
    try:
        os.listdir(folder)
    except FileNotFoundError:
        return "no such folder"
    except NotADirectoryError:
        return "a file"
    except (OSError, ValueError) as error:
        return f"{error}"
    absent = [name for name in (_DATA, _ARRAYS) if not os.path.isfile(folder / name)]
    return f"no {joined(absent)}" if absent else ""


def _unlike(arrays: Mapping[str, np.ndarray], digests: Mapping[str, Digest]) -> Iterator[str]:
    """Yield how arrays differ from their digests."""
    if missing := sorted(digests.keys() - arrays.keys()):
        yield f"lacks {quoted(missing)}"
    if other := sorted(arrays.keys() - digests.keys()):
        yield f"also holds {quoted(other)}"
    both = [name for name in digests if name in arrays]
    if changed := [name for name in both if Digest.of(arrays[name]) != digests[name]]:
        yield f"{quoted(changed)} were changed after they were written"


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()
