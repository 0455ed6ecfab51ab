"""Read `FILE.py:make` or `package.module:make`: import the module, and call its function."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from jax_attn.parity.pair.errors import MissingModuleError, PairError, of_user, refusal
from jax_attn.parity.pair.pair import Pair, TrainingPair

EXPECTED = "expected (reference, port, inputs), a parity.Pair or a parity.TrainingPair"


def function(named: str) -> Callable[..., Any]:
    """Import the function that `FILE.py:NAME` or `package.module:NAME` names. Raises PairError."""
    place, colon, name = named.rpartition(":")
    if not (place and colon and name):
        raise PairError(f"expected FILE.py:FUNCTION or package.module:FUNCTION, got {named!r}")
    module = _imported(place)
    try:
        make = getattr(module, name, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may have a `__getattr__` of its own
        raise _told(f"{place}: looking up {name!r} raises", error) from error
    if not callable(make):
        own = [
            key
            for key, value in vars(module).items()
            if isinstance(value, FunctionType) and value.__module__ == module.__name__
        ]
        raise PairError(f"{place}: expected one of the functions {own}, got {name!r}")
    return make


def made(named: str, dtype: str | None) -> Any:
    """Import the function and call it; it receives `dtype` if it takes one. Raises PairError."""
    if dtype == "float64":
        import jax

        jax.config.update("jax_enable_x64", True)  # before the port is built
    make = function(named)
    return called(named, make, **({"dtype": dtype} if dtype and takes(make, "dtype") else {}))


def takes(make: Callable[..., Any], argument: str) -> bool:
    """Return whether a function has an argument of this name; False if it does not tell."""
    try:
        return argument in inspect.signature(make).parameters
    except (TypeError, ValueError):  # some built-in types have no signature
        return False


def called(named: str, make: Callable[..., Any], **arguments: Any) -> Any:
    """Return what the function returns.

    Raises PairError, with the user's lines, if it raises, and MemoryError if memory runs out.
    """
    try:
        return make(**arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # pytest's outcomes, for one, are no Exception
        raise _told(f"{named} raises", error) from error


def pair_of(named: str, result: Any) -> Pair | TrainingPair:
    """Convert what a function returned to a pair. Raises PairError."""
    if isinstance(result, Pair | TrainingPair):
        return _plain(named, result)
    if isinstance(result, tuple) and len(result) == 3:
        return Pair(*result)
    if not isinstance(result, tuple):
        raise PairError(f"{named}: {EXPECTED}, got {type(result).__name__}")
    more = "; give further arguments as in parity.Pair(reference, port, inputs, layout=…)"
    raise PairError(f"{named}: {EXPECTED}, got {len(result)} values{more}")


def _plain(named: str, pair: Pair | TrainingPair) -> Pair | TrainingPair:
    """Return a pair of a subclass of the user's as one of ours, so that it can be copied."""
    kind = Pair if isinstance(pair, Pair) else TrainingPair
    try:
        return kind(**{f.name: getattr(pair, f.name) for f in fields(kind)})
    except Exception as error:
        raise PairError(f"{named}: {EXPECTED}, got {type(pair).__name__}: {error}") from error


def port_of(named: str, result: Any) -> Pair | TrainingPair:
    """Convert what a function returned to a pair of which only the port's side is read."""
    if isinstance(result, tuple) and len(result) == 3:
        return Pair(*result)
    nothing: Any = None
    is_pair = isinstance(result, Pair | TrainingPair)
    return _plain(named, result) if is_pair else Pair(nothing, result, nothing)


def _imported(place: str) -> ModuleType:
    """Import the module of a file or a name, with the file's folder first in sys.path."""
    path = Path(place)
    is_file = place.endswith(".py")
    if is_file and not path.is_file():
        raise PairError(f"{place}: expected a Python file, but there is none")
    # sys.path stays changed, because the function may import more when it is called.
    folder = str(path.resolve().parent) if is_file else ""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if not is_file:
            return importlib.import_module(place)
        # A distinct name, because the file may be named like a module that others import.
        name = f"_jax_attn_pair_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path.resolve())
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look modules up there
        spec.loader.exec_module(module)
        return module
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may raise anything
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and not is_file and f"{place}.".startswith(f"{absent}."):  # it, or its package
            raise PairError(f"{place}: expected a module, but there is none") from error
        raise _told(f"{place} does not import", error) from error


def _told(what: str, error: BaseException) -> PairError | MemoryError:
    """Return the error to raise: the user's own, with the user's lines.

    Memory that runs out is no mistake of the file's.
    """
    message = f"{what}\n{of_user(error)}"
    if isinstance(error, MemoryError):
        return MemoryError(message)
    refused = refusal(error)
    if isinstance(refused, MissingModuleError):
        return MissingModuleError(message, refused.name)
    return PairError(message)
