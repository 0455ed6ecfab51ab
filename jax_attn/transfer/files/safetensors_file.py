"""A safetensors file as views of its mapped bytes: tensors are read when they are used.

The safetensors package first opens every file and refuses a corrupt one; the offsets used here come
from the header that it has checked. It accepts names that occur twice, which are refused here.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
from safetensors import SafetensorError, safe_open

from jax_attn.transfer.arrays import Spec
from jax_attn.transfer.files.json_file import unique
from jax_attn.transfer.problems import file_error

DTYPE_OF_CODE = {
    "BOOL": "bool",
    "I8": "int8",
    "U8": "uint8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
"""The format's codes of dtypes that NumPy and ml_dtypes have; the format has more."""

FORMAT = "format"
"""The only name in a file's metadata that never means a tensor."""

Views = dict[str, np.ndarray | Spec]


def views(path: Path) -> tuple[Views, Views]:
    """Return the tensors that a file stores, by key; and those tied to one of them.

    A tensor is a read-only view of the mapped file, which stays open as long as the view; bfloat16
    is ml_dtypes'. A tensor whose dtype NumPy lacks is returned as its Spec. Ties are in the
    metadata, where `safetensors.torch.save_model` writes them: left-out key -> kept key. Raises
    TransferError.
    """
    _check(path)
    try:
        data = np.asarray(np.memmap(path, mode="r"))
        start, header, metadata = _header(data)
        tensors = {key: _view(data[start:], entry) for key, entry in header.items()}
    except (ValueError, OverflowError, RecursionError, OSError) as error:
        raise file_error(path, f"expected a valid safetensors header: {error}") from error
    ties = {
        key: tensors[kept]
        for key, kept in metadata.items()
        if kept in tensors and key not in tensors and key != FORMAT
    }
    return tensors, ties


def offsets(path: Path) -> dict[str, int]:
    """Return where each tensor's bytes begin in a file that the package wrote."""
    start, header, _ = _header(np.asarray(np.memmap(path, mode="r")))
    return {key: start + entry["data_offsets"][0] for key, entry in header.items()}


def _check(path: Path) -> None:
    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        reason = f"expected a complete safetensors file ({path.stat().st_size} bytes): {error}"
        raise file_error(path, reason) from error


def _header(data: np.ndarray) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return the offset of the tensors, their entries by key, and the metadata."""
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(str(data[8:start].tobytes(), "utf-8"), object_pairs_hook=unique)
    metadata = header.pop("__metadata__", None) or {}
    return start, header, metadata


def _view(data: np.ndarray, entry: dict[str, Any]) -> np.ndarray | Spec:
    shape, code = tuple(entry["shape"]), entry["dtype"]
    if code not in DTYPE_OF_CODE:
        return Spec(shape, code)
    begin, end = entry["data_offsets"]
    return data[begin:end].view(DTYPE_OF_CODE[code]).reshape(shape)
