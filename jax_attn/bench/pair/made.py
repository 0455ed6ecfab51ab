"""The pair that a function of the user's makes, as every process of a run makes it for itself."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from flax import nnx

from jax_attn.bench.workload import CACHED, PAIR_MODES, STEP, PairError
from jax_attn.transfer import Layout, flatten

EXPECTED = "expected (torch module, NNX module, inputs[, layout[, (reference_call, port_call)]])"


Inputs: TypeAlias = tuple[np.ndarray, ...] | Mapping[str, np.ndarray]


class Cached(NamedTuple):
    """How a side reads a prompt into a cache, and one token more.

    prefill: (module, **inputs) -> (output, cache). step: (module, cache, **one token of each
    input) -> (output, a cache as it was given).
    """

    prefill: Callable[..., Any]
    step: Callable[..., Any]


class Pair(NamedTuple):
    """As `parity.check` takes them.

    by_length: inputs of other lengths. cached: of the reference and the port, where they have a
    cache. check: the pair's own, which returns a `Result`; `parity.check` of the inputs unless
    given.
    """

    reference: torch.nn.Module
    port: nnx.Module
    inputs: Inputs
    layout: Layout | None = None
    calls: tuple[Callable[..., Any] | None, Callable[..., Any] | None] = (None, None)
    by_length: Mapping[int, Inputs] = {}
    cached: tuple[Cached, Cached] | None = None
    check: Callable[[], Any] | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Those that are measured; 0 stands for the inputs, where there is no other."""
        return tuple(self.by_length) or (0,)

    @property
    def modes(self) -> tuple[str, ...]:
        """Those in which it can be measured."""
        return (*PAIR_MODES, *CACHED) if self.cached else PAIR_MODES

    @property
    def usual_modes(self) -> tuple[str, ...]:
        """Those in which it is measured unless others are asked for."""
        return (*CACHED, STEP) if self.cached else PAIR_MODES

    def at(self, length: int) -> "Pair":
        """The pair with its inputs of this length."""
        return self._replace(inputs=self.by_length.get(length, self.inputs))

    @property
    def named_inputs(self) -> dict[str, np.ndarray]:
        """By position, "0" first, or by keyword."""
        if isinstance(self.inputs, Mapping):
            return dict(self.inputs)
        return {str(i): a for i, a in enumerate(self.inputs)}

    def call_reference(self, *args: Any, **kwargs: Any) -> Any:
        call = self.calls[0] or _called
        return call(self.reference, *args, **kwargs)

    def call_port(self, port: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        call = self.calls[1] or _called
        return call(port, *args, **kwargs)

    def with_arrays(self, arrays: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of a call on other arrays under the names of the inputs."""
        if isinstance(self.inputs, Mapping):
            return (), dict(arrays)
        return tuple(arrays.values()), {}


def _called(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def made(named: str | Pair, lengths: tuple[int, ...] = ()) -> Pair:
    """What `FILE.py:FUNCTION` or `package.module:FUNCTION` makes; of a checkpoint's folder or file
    its model in both frameworks; a pair as it is.

    lengths: of the inputs, which a function takes as its argument `length`. Raises PairError.
    """
    if isinstance(named, Pair):
        return named
    if Path(named).exists() and not named.endswith(".py"):
        from jax_attn.bench.pair.checkpoint import pair_of_checkpoint

        return pair_of_checkpoint(Path(named), lengths)
    place, colon, name = named.rpartition(":")
    if not (place and colon and name):
        raise PairError(f"expected FILE.py:FUNCTION or package.module:FUNCTION, got {named!r}")
    module = _imported(place)
    make = getattr(module, name, None)
    if not callable(make):
        own = [
            key
            for key, value in vars(module).items()
            if isinstance(value, FunctionType) and value.__module__ == module.__name__
        ]
        raise PairError(f"{place}: expected one of the functions {own}, got {name!r}")
    if lengths and "length" not in inspect.signature(make).parameters:
        raise PairError(f"{named}: expected an argument `length`, which --lengths gives, got none")
    arguments: list[dict[str, int]] = [{"length": length} for length in lengths] or [{}]
    try:
        results = [make(**given) for given in arguments]
    except Exception as error:
        raise PairError(f"{named} raises\n{_of_user(error, module)}") from error
    pairs = [pair_of(named, result) for result in results]
    inputs = (pair.inputs for pair in pairs)
    return pairs[0]._replace(by_length=dict(zip(lengths, inputs, strict=False)))


def pair_of(where: str, result: Any) -> Pair:
    """A tuple as a pair. Raises PairError with all that is wrong with it."""
    if not isinstance(result, tuple) or not 3 <= len(result) <= 5:
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise PairError(f"{where}: {EXPECTED}, got {got}")
    if problems := [*_problems(*result)]:
        raise PairError("\n".join([f"{where}: {EXPECTED}", *(f"  {text}" for text in problems)]))
    pair = Pair(*result)
    return pair._replace(calls=pair.calls or (None, None))


def digests(pair: Pair) -> dict[str, str]:
    """What tells one pair from another, by name: its inputs and the parameters of both sides."""
    arrays = {
        f"input {name}" + f" of length {length}" * bool(length): np.asarray(a)
        for length in pair.lengths
        for name, a in pair.at(length).named_inputs.items()
    }
    arrays |= {
        f"reference's {name}": x.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
        for name, x in pair.reference.state_dict().items()
    }
    params = flatten(nnx.state(pair.port, nnx.Param))
    arrays |= {f"port's {path}": np.asarray(a) for path, a in params.items()}
    return {
        name: hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()
        for name, a in arrays.items()
    }


def _imported(place: str) -> ModuleType:
    """The module of a file or a name, with the file's folder first, as Python runs it."""
    path, before = Path(place), [*sys.path]
    is_file = place.endswith(".py")
    if is_file and not path.is_file():
        raise PairError(f"{place}: expected a Python file, got none there")
    name = path.stem if is_file else place
    sys.path.insert(0, str(path.resolve().parent) if is_file else "")
    try:
        if not is_file:
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(name, path.resolve())
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickles look there
        spec.loader.exec_module(module)
        return module
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's module raises
        raise PairError(f"{place} does not import\n{_of_user(error, path)}") from error
    finally:
        sys.path[:] = before


def _of_user(error: BaseException, own: ModuleType | Path) -> str:
    """The error with the lines of the user's own file alone."""
    file = str(own.resolve()) if isinstance(own, Path) else getattr(own, "__file__", None)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    lines = traceback.format_list(frames) + traceback.format_exception_only(error)
    return "".join(lines).rstrip()


def _problems(
    reference: Any, port: Any, inputs: Any, layout: Any = None, calls: Any = None
) -> Iterator[str]:
    for name, value, kind, expected in (
        ("reference", reference, torch.nn.Module, "a torch.nn.Module"),
        ("port", port, nnx.Module, "a flax.nnx.Module"),
        ("layout", layout, Layout | None, "a Layout or None"),
    ):
        if not isinstance(value, kind):
            yield f"{name}: expected {expected}, got {type(value).__name__}"
    if isinstance(inputs, tuple | Mapping):
        arrays: Any = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
        for which, a in arrays:
            if not isinstance(a, np.ndarray):
                yield f"inputs[{which!r}]: expected a NumPy array, got {type(a).__name__}"
    else:
        yield f"inputs: expected a tuple or a dict of NumPy arrays, got {type(inputs).__name__}"
    is_pair = isinstance(calls, tuple) and len(calls) == 2
    if calls is not None and not (is_pair and all(c is None or callable(c) for c in calls)):
        yield f"calls: expected (reference_call, port_call), each a function or None, got {calls!r}"
