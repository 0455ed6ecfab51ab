"""Messages between two processes: plain data as JSON, arrays as safetensors; neither runs code.

A message is two parts, the data and the arrays, each after its length in eight bytes.
"""

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from safetensors import deserialize
from safetensors.numpy import save

from jax_attn.parity.checking.digests import Digest, Digests
from jax_attn.parity.checking.weights import Weights
from jax_attn.parity.golden.codec import TreeEncoder, decode
from jax_attn.parity.run.asked_port import PortFacts
from jax_attn.parity.run.inputs_and_runs import Inputs, Run
from jax_attn.transfer.files.safetensors_file import DTYPE_OF_CODE

TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (Inputs, Run, PortFacts, Weights, Digests, Digest)
}
"""The objects that a message may hold, with arrays, words, numbers, tuples and mappings."""
_PIECE, _WORDS = 2**20, 2**26
"""Bytes that are read at once; the largest number of bytes of data without arrays."""
_LEAST = 1e-3
"""Seconds; a socket takes 0 for something else."""


class MessageError(Exception):
    """No message that can be read: the other side ended, or wrote something else."""


class TooSlowError(MessageError):
    """No message in time."""


def written(value: Any) -> tuple[bytes, bytes]:
    """Return the parts of a message. Raises TypeError for an array that safetensors cannot hold."""
    encoder = TreeEncoder(TYPES)
    data = json.dumps(encoder.encode(value), allow_nan=False).encode()
    known = DTYPE_OF_CODE.values()
    for name, a in encoder.arrays.items():
        if a.dtype.name not in known:
            raise TypeError(f"{name}: expected an array of {', '.join(known)}, got {a.dtype.name}")
    whole = {k: a if a.flags.c_contiguous else a.copy("C") for k, a in encoder.arrays.items()}
    return data, save(whole)


def send(channel: socket.socket, value: Any, *, seconds: float | None = None) -> None:
    """Write a message. Raises TypeError as `written` does, and MessageError.

    seconds: how long it may take.
    """
    parts = written(value)
    end = None if seconds is None else time.monotonic() + seconds
    try:
        for part in parts:
            for piece in (len(part).to_bytes(8, "little"), part):
                left = None if end is None else max(end - time.monotonic(), _LEAST)
                channel.settimeout(left)  # of the whole piece
                channel.sendall(piece)
    except TimeoutError as error:
        raise TooSlowError from error
    except OSError as error:
        raise MessageError(f"{error}") from error


def parsed(data: bytes | bytearray, arrays: bytes | bytearray) -> Any:
    """Return the value of a message that is in two parts. Raises MessageError."""
    try:
        tensors = {
            name: np.frombuffer(t["data"], DTYPE_OF_CODE[t["dtype"]]).reshape(t["shape"])
            for name, t in deserialize(bytes(arrays))
        }
        return decode(json.loads(data), tensors, TYPES)
    except Exception as error:  # whatever the other side wrote
        raise MessageError(f"wrote no message: {error!r}") from error


def receive(
    channel: socket.socket, *, seconds: float | None = None, limit: int | None = None
) -> Any:
    """Read a message.

    seconds: how long it may take. limit: the largest number of bytes of the arrays. Raises
    MessageError.
    """
    end = None if seconds is None else time.monotonic() + seconds

    def read(count: int) -> bytearray:
        held = bytearray()
        while len(held) < count:
            left = None if end is None else end - time.monotonic()
            if left is not None and left < 0:
                raise TooSlowError
            channel.settimeout(None if left is None else max(left, _LEAST))
            try:
                piece = channel.recv(min(_PIECE, count - len(held)))
            except TimeoutError as error:
                raise TooSlowError from error
            except OSError as error:
                raise MessageError(f"{error}") from error
            if not piece:
                raise MessageError("ended")
            held += piece
        return held

    words = _WORDS if limit is None else min(limit, _WORDS)
    return parsed(_part(read, words, ""), _part(read, limit, _ROOM))


_ROOM = (
    "; arrays may fill a quarter of the free memory: free some, or capture the reference with "
    "--parameters"
)


def _part(read: Callable[[int], bytearray], limit: int | None, hint: str) -> bytearray:
    size = int.from_bytes(read(8), "little")
    if limit is not None and size > limit:
        raise MessageError(
            f"wrote {size:,} bytes at once, more than the {limit:,} that may come{hint}"
        )
    return read(size)
