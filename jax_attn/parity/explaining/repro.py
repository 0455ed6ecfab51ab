"""Write a self-contained script that computes one wrong tensor as the port and the reference do.

It needs NumPy, JAX and PyTorch, but neither model. Both functions begin at tensors that are right
on both sides. If any numbers will do for these, the script draws them; masks, positions and small
tensors are included as they are.
"""

import base64
import math
import zlib
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_attn.parity.bugs.views import views
from jax_attn.parity.explaining.align import difference
from jax_attn.parity.explaining.region import Region, TapPair, Wrong
from jax_attn.parity.explaining.taps.jax_taps import JaxRun
from jax_attn.parity.explaining.taps.recording import UnwrittenError, written
from jax_attn.parity.explaining.taps.tap import Tap, ancestors, numbers_of
from jax_attn.parity.explaining.taps.tapping import seen
from jax_attn.parity.explaining.taps.torch_taps import TorchTaps

_FEW = 16
"""Arrays of at most this size are written out; arrays of at most this many different numbers, such
as masks, are not drawn."""
_MOST = 100_000
"""The largest number of bytes of an array that the script includes as it is."""
_NEAR = 1e-9
"""Tolerance of a function's result against the run's, as a share of its largest number."""
_SHOWN = 0.1
"""The smallest share of the error that a script must show."""

_SCRIPT = '''"""{wrong}

Both functions begin at tensors that the port has right, and end at the first that it has wrong.
"""

import base64
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax


def packed(text, dtype, shape):
    return np.frombuffer(zlib.decompress(base64.b85decode(text)), dtype).reshape(shape)


{port}


{reference}


def both():
    """The tensor of the port, and that of the reference in its shape."""
    rng = np.random.default_rng(0)
{data}
    of_port = port({for_port})
    of_reference = reference({for_reference})
    return np.asarray(of_port, np.float64), of_reference.numpy(){view}


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    ours, theirs = both()
    with np.errstate(invalid="ignore"):
        apart = np.nan_to_num(np.where(ours == theirs, 0.0, np.abs(ours - theirs)), nan=np.inf)
    at = tuple(map(int, np.unravel_index(apart.argmax(), apart.shape)))
    print(f"furthest apart at {{list(at)}}: {{ours[at]:.9g}}, expected {{theirs[at]:.9g}}")
'''


def repro(region: Region, ours: JaxRun, theirs: TorchTaps) -> str:
    """Return the script; "" if an operation cannot be written, or if no script shows the error.

    ours: the run in which the region was found.
    """
    right = {pair.theirs.index for pair in region.last_matched}
    # A tensor and one computed from it, such as its mean, fit each other only as in the model.
    is_made = any(len(ancestors(theirs.taps, [i]) & right) > 1 for i in right)
    for draws in (False, True) if is_made else (True, False):
        try:
            script = _Script(region, ours, theirs, draws=draws)
            if script.shows_the_error():
                return script.text
        except Exception:  # any operation may raise; an explanation does not need a script
            continue
    return ""


class _Script:
    """One script. draws: whether large tensors are drawn; both sides receive the same ones."""

    def __init__(self, region: Region, ours: JaxRun, theirs: TorchTaps, *, draws: bool):
        data = _Data(draws=draws)
        self._wrong = region.first_wrong
        self._reference = _reference(region, theirs, data)
        right = self._reference.right if draws else region.last_matched
        self._port = _port(self._wrong, right, ours, data)
        self.text = _SCRIPT.format(
            wrong=f"{self._wrong.ours}  instead of  {self._wrong.theirs}",
            port=self._port.text,
            reference=self._reference.text,
            data="\n".join(data.lines),
            for_port=self._port.made,
            for_reference=self._reference.made,
            view=_seen_as(self._wrong),
        )

    def shows_the_error(self) -> bool:
        """Return whether the functions give the models' tensors, and the script a large error."""
        script: dict[str, Any] = {"__name__": "script"}
        exec(self.text, script)
        port = np.asarray(script["port"](*self._port.values), np.float64)
        reference = script["reference"](*self._reference.values).numpy()
        if not (_is_near(port, self._wrong.ours) and _is_near(reference, self._wrong.theirs)):
            return False
        error = _error(self._wrong.ours.numbers, self._wrong.expected)
        shown = _error(*map(numbers_of, script["both"]()))
        return shown >= _SHOWN * error and math.isinf(shown) == math.isinf(error)


class _Data:
    """The arrays of a script, shared by both sides if they are equal.

    draws: whether large arrays are drawn.
    """

    def __init__(self, *, draws: bool):
        self.lines: list[str] = []
        self._draws = draws
        self._names: dict[tuple[Hashable, ...], str] = {}

    def of(self, pair: TapPair) -> str:
        """Return the name of a tensor of both sides, with the reference's numbers in float32."""
        with np.errstate(over="ignore"):  # a mask's fill may be that of float64
            value = pair.theirs.value.astype(np.float32)
        return self.name(value, f"{pair.ours}  =  {pair.theirs}")

    def name(self, value: np.ndarray, comment: str = "") -> str:
        """Return the name of an array. comment: its tensors in the models."""
        if value.dtype.kind == "f":
            narrow = value.astype(np.float32)
            value = narrow if np.array_equal(narrow, value, equal_nan=True) else value
        key = (value.shape, value.dtype.str, value.tobytes())
        if key not in self._names:
            self._names[key] = name = f"x{len(self._names)}"
            line = f"    {name} = {_array(value, draws=self._draws)}"
            self.lines.append(f"{line}  # {comment}" if comment else line)
        return self._names[key]


class _Argument(NamedTuple):
    """An argument of a function.

    made: the expression by which the script makes it. value: the model's value. right: the tensor
    of both sides that it is, if it is one.
    """

    name: str
    made: str
    value: Any
    right: TapPair | None


class _Function:
    """The function of one side; its arguments are named in the order in which its lines use them.

    key: identifies a value.
    """

    text = ""

    def __init__(self, key: Callable[[Any], Hashable]):
        self._key = key
        self._arguments: dict[Hashable, _Argument] = {}

    def argument(self, x: Any, made: str, right: TapPair | None = None) -> str:
        """Return the name of an argument with this value; add it if it is new."""
        argument = _Argument(f"a{len(self._arguments)}", made, x, right)
        return self._arguments.setdefault(self._key(x), argument).name

    def write(self, name: str, lines: list[str]) -> None:
        """Set the text of the function."""
        head = f"def {name}({', '.join(a.name for a in self._arguments.values())}):"
        self.text = "\n".join([head, *(f"    {line}" for line in lines)])

    @property
    def made(self) -> str:
        """The arguments, as expressions of the script."""
        return ", ".join(a.made for a in self._arguments.values())

    @property
    def values(self) -> list[Any]:
        """The arguments, as values of the model."""
        return [a.value for a in self._arguments.values()]

    @property
    def right(self) -> list[TapPair]:
        """The arguments that are tensors of both sides."""
        return [a.right for a in self._arguments.values() if a.right]


def _reference(region: Region, taps: TorchTaps, data: _Data) -> _Function:
    function = _Function(seen)
    right = {seen(taps.tensors[pair.theirs.index]): pair for pair in region.last_matched}

    def given(x: torch.Tensor) -> str | None:
        pair = right.get(seen(x))
        return named(x, data.of(pair), pair) if pair else None

    def unmade(x: torch.Tensor) -> str:
        return named(x, data.name(x.detach().numpy()))

    def named(x: torch.Tensor, array: str, pair: TapPair | None = None) -> str:
        dtype = ", dtype=torch.float64" if x.is_floating_point() else ""
        return function.argument(x.detach(), f"torch.tensor({array}{dtype})", pair)

    wrong = taps.tensors[region.first_wrong.theirs.index]
    function.write("reference", taps.recording.written(wrong, given, unmade))
    return function


def _port(wrong: Wrong, pairs: Iterable[TapPair], run: JaxRun, data: _Data) -> _Function:
    function = _Function(id)
    right = {id(run.arrays[pair.ours.index]): pair for pair in pairs}

    def given(x: Any) -> str | None:
        pair = right.get(id(x))
        return named(x, f"{data.of(pair)}{_seen_as(pair)}", pair) if pair else None

    def unmade(x: Any) -> str:
        dtype = jnp.result_type(x)
        if jnp.issubdtype(dtype, jax.dtypes.extended):  # random keys
            raise UnwrittenError
        value = np.asarray(x)
        value = value.astype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else value
        if not value.ndim:
            return f"jnp.asarray({written(value.item(), lambda x: None)}, {dtype.name!r})"
        return named(x, data.name(value))

    def named(x: Any, array: str, pair: TapPair | None = None) -> str:
        return function.argument(x, f"jnp.asarray({array}, {x.dtype.name!r})", pair)

    array = run.arrays[wrong.ours.index]
    function.write("port", run.recording.written(array, given, unmade))
    return function


def _array(value: np.ndarray, *, draws: bool) -> str:
    """Write an array as Python. draws: whether a large array is drawn, from the same range."""
    dtype, shape = f"np.{value.dtype.name}", tuple(map(int, value.shape))
    if value.size <= _FEW:
        numbers = written(value.tolist(), lambda x: None)
        return f"np.array({numbers}, {dtype})"
    different = np.unique(value)
    if len(different) == 1:
        return f"np.full({shape}, {written(different.item(), lambda x: None)}, {dtype})"
    if draws and value.dtype.kind == "f" and len(different) > _FEW and np.isfinite(value).all():
        least, most = float(f"{different[0]:.3g}"), float(f"{different[-1]:.3g}")
        return f"rng.uniform({least}, {most}, {shape}).astype({dtype})"
    if value.nbytes > _MOST:
        raise UnwrittenError
    packed = base64.b85encode(zlib.compress(np.ascontiguousarray(value).tobytes(), 9)).decode()
    return f"packed({packed!r}, {dtype}, {shape})"


def _seen_as(pair: TapPair) -> str:
    """Return the method calls that bring the reference's tensor into the port's shape."""
    theirs, ours = pair.theirs, pair.ours
    view = min(
        views(theirs.shape, ours.shape),
        key=lambda view: difference(view.of(theirs.numbers), ours.numbers),
    )
    if view.axes == tuple(sorted(view.axes)):
        return f".reshape{view.shape}" if view.shape != theirs.shape else ""
    split = f".reshape{view.split}" if view.split != theirs.shape else ""
    permuted = tuple(view.split[axis] for axis in view.axes)
    merged = f".reshape{view.shape}" if permuted != view.shape else ""
    return f"{split}.transpose{view.axes}{merged}"


def _is_near(value: np.ndarray, tap: Tap) -> bool:
    """Return whether a function gives the model's tensor."""
    ours, theirs = numbers_of(value), tap.numbers
    if ours.shape != theirs.shape:
        return False
    largest = np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0)
    alike = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    with np.errstate(invalid="ignore"):
        return bool((alike | (np.abs(ours - theirs) <= _NEAR * largest)).all())


def _error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the RMS error over that of `theirs`; infinite if only one has a fill or NaN."""
    is_finite = np.isfinite(ours) & np.isfinite(theirs)
    if not np.array_equal(ours[~is_finite], theirs[~is_finite], equal_nan=True):
        return math.inf
    size = float(np.square(theirs[is_finite]).sum())
    error = float(np.square((ours - theirs)[is_finite]).sum())
    return math.sqrt(error / size) if size else math.inf
