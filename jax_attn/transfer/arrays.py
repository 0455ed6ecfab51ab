"""Conversion of any framework's tensors to NumPy arrays, bit for bit, without importing it.

A caller that passes a tensor has imported its framework already, so looking into `sys.modules` is
enough.
"""

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

from jax_attn.dtypes import DTYPES
from jax_attn.transfer.problems import Problem, TransferError

Tensors = Mapping[str, Any]
"""Names to NumPy, JAX or torch tensors; `Any`, because either framework may be absent."""

Value = TypeVar("Value")

_CHUNK = 2**24
"""Bytes to copy at a time."""

# torch cannot convert these to NumPy or back: they are passed as integers of the same width.
_REINTERPRETED = {
    "bfloat16": "int16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
}

# Kinds of torch tensors that are not plain arrays, and what the caller can do about each.
_TORCH_REFUSALS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda t: t.is_quantized,
        "a quantised tensor; expected plain numbers: call .dequantize() first",
    ),
    (lambda t: t.is_meta, "a tensor on the meta device, which has no values; load real weights"),
    (lambda t: t.is_nested, "a nested tensor; expected one rectangular array"),
    (
        lambda t: "strided" not in str(t.layout),
        "a sparse tensor; expected a dense one: call .to_dense() first",
    ),
    (lambda t: hasattr(t, "full_tensor"), "a sharded tensor; call .full_tensor() first"),
)


class Spec(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes; a dtype that NumPy lacks has as many bits as its name says."""
        try:
            return math.prod(self.shape) * np.dtype(self.dtype).itemsize
        except TypeError:
            bits = re.search(r"\d+", self.dtype)  # F6_E2M3
            return -(-math.prod(self.shape) * int(bits[0]) // 8) if bits else 0

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class LazyMapping(Mapping[str, Value]):
    """A mapping with known names, whose values are made on access.

    Unlike in Python's own Mapping, `in` makes no value.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = dict.fromkeys(names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def as_numpy(tensor: Any, name: str = "tensor") -> np.ndarray:
    """Return `tensor` as a NumPy array of the same shape, dtype and bits, in native byte order.

    Args:
      tensor: a NumPy, JAX or torch tensor on any device. bfloat16 and float8 become ml_dtypes'.
      name: the tensor's name in errors.

    Returns:
      The array, which may share memory with `tensor`.

    Raises:
      TransferError: `tensor` is not a dense array of numbers.
    """
    if reason := why_unreadable(tensor):
        raise _unreadable(name, reason)
    try:
        array = _from_torch(tensor) if _is(tensor, "torch", "Tensor") else np.asarray(tensor)
    except Exception as error:  # frameworks differ: deleted, traced, not addressable …
        raise _unreadable(name, f"{type(tensor).__name__}: {error}") from error
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def as_torch(array: np.ndarray) -> Any:
    """Return `array` as a torch tensor in the same memory; unchanged if torch is not imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return array
    name = array.dtype.name
    if name not in _REINTERPRETED:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(_REINTERPRETED[name])).view(getattr(torch, name))


def describe(tensor: Any) -> Spec:
    """Return shape and dtype name without touching the values."""
    return Spec(tuple(map(int, tensor.shape)), _dtype_name(tensor.dtype))


def read(tensors: Tensors, key: str) -> np.ndarray:
    """Return `tensors[key]` for immediate use; an array mapped from a file is not copied."""
    mapped = getattr(tensors, "mapped", None)
    return mapped(key) if mapped else as_numpy(tensors[key], key)


def expect_mapping(tensors: Any) -> None:
    """Raise TypeError unless `tensors` is a mapping."""
    if not isinstance(tensors, Mapping):
        hint = ": pass its state_dict()" if hasattr(tensors, "state_dict") else ""
        kind = type(tensors).__name__
        raise TypeError(f"tensors: expected a mapping of names to tensors, got {kind}{hint}")


def specs(tensors: Tensors) -> tuple[dict[str, Spec], list[Problem]]:
    """Return shapes and dtypes by key, and a problem for each tensor that cannot be read.

    A lazy mapping provides them by its `describe`.
    """
    describe_key = getattr(tensors, "describe", lambda key: _spec(tensors[key], key))
    by_key: dict[str, Spec] = {}
    problems = []
    for key in tensors:
        if not isinstance(key, str):
            text = f"expected a string as key, got {type(key).__name__}"
            problems.append(Problem("unreadable", str(key), text))
            continue
        try:
            by_key[key] = describe_key(key)
        except TransferError as error:
            problems += error.problems
    return by_key, problems


def same_memory(tensors: Tensors, keys: Iterable[str]) -> dict[str, str]:
    """Map each of `keys` whose tensor occupies an earlier key's memory to that earlier key.

    Views that only overlap count as two tensors, and so do two empty ones.
    """
    get = getattr(tensors, "mapped", tensors.__getitem__)
    first: dict[tuple, str] = {}
    ties = {}
    for key in keys:
        earlier = first.setdefault(_memory(get(key)), key)
        # A lazy mapping may reuse the memory of a released tensor: hold both at once.
        if earlier != key and _same(get(earlier), get(key)):
            ties[key] = earlier
    return ties


def chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the bytes of an array in C order, a few rows at a time, whatever its strides."""
    rows = np.atleast_1d(array)
    step = max(1, _CHUNK * len(rows) // max(1, rows.nbytes))
    for i in range(0, len(rows), step):
        yield np.ascontiguousarray(rows[i : i + step]).reshape(-1).view(np.uint8)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays have the same shape, dtype and bits."""
    if describe(one) != describe(other):
        return False
    return all(map(np.array_equal, chunks(one), chunks(other)))


def why_unreadable(tensor: Any) -> str:
    """Say why `as_numpy` would refuse `tensor`; empty if it would not."""
    if _is(tensor, "torch", "Tensor"):
        return next((why for is_so, why in _TORCH_REFUSALS if is_so(tensor)), "")
    if _is(tensor, "jax", "Array"):
        return ""
    if isinstance(tensor, np.ndarray | np.generic):
        holds_numbers = tensor.dtype.kind in "biufc" or hasattr(ml_dtypes, tensor.dtype.name)
        return "" if holds_numbers else f"expected numbers, got dtype {tensor.dtype}"
    return f"expected a NumPy, JAX or torch tensor, got {type(tensor).__name__}"


def _spec(tensor: Any, name: str) -> Spec:
    if reason := why_unreadable(tensor):
        raise _unreadable(name, reason)
    return describe(tensor)


def _same(one: Any, other: Any) -> bool:
    return _memory(one) == _memory(other) and 0 not in one.shape


def _memory(tensor: Any) -> tuple:
    """Return a tuple that is equal for two live tensors with the same memory and layout."""
    if _is(tensor, "torch", "Tensor"):
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    if isinstance(tensor, np.ndarray):
        return tensor.ctypes.data, tensor.shape, tensor.strides, tensor.dtype.name
    return (id(tensor),)


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.") if _is(dtype, "torch", "dtype") else dtype.name


def _is(value: Any, framework: str, kind: str) -> bool:
    module = sys.modules.get(framework)
    return module is not None and isinstance(value, getattr(module, kind))


def _from_torch(tensor: Any) -> np.ndarray:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    name = _dtype_name(tensor.dtype)
    if name not in _REINTERPRETED:
        return tensor.numpy()
    bits = tensor.contiguous().view(getattr(sys.modules["torch"], _REINTERPRETED[name]))
    return bits.numpy().view(getattr(ml_dtypes, name))


def _unreadable(name: str, reason: str) -> TransferError:
    return TransferError(f"reading {name!r}", [Problem("unreadable", name, reason)])


def recast(array: np.ndarray, dtype: str) -> np.ndarray:
    """Cast floating-point arrays, overflowing to infinity; return other arrays unchanged."""
    if array.dtype.name not in DTYPES:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype, copy=False)
