"""Make the pair that a user's function returns; every process of a run makes its own."""

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from jax_attn.bench.pair.checkpoint import pair_of_checkpoint
from jax_attn.bench.pair.pair import Pair
from jax_attn.bench.workload import PairError
from jax_attn.transfer import Layout
from jax_attn.transfer.kinds.held import as_call, as_module, why_no_port

EXPECTED = "expected (torch module, port, inputs[, layout[, (reference_call, port_call)]])"


def made(named: str | Pair, lengths: tuple[int, ...] = ()) -> Pair:
    """Make the pair that `named` stands for. Raises PairError.

    named: `FILE.py:FUNCTION` or `package.module:FUNCTION`, which is called; a checkpoint's folder
    or file, whose model is built in both frameworks; or a pair, which is returned as it is.
    lengths: the lengths of the inputs; a function takes each as its argument `length`.
    """
    if isinstance(named, Pair):
        return named
    if Path(named).exists() and not named.endswith(".py"):
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
    except (Exception, SystemExit) as error:
        raise PairError(f"{named} raises\n{of_user(error)}") from error
    pairs = [pair_of(named, result) for result in results]
    inputs = (pair.inputs for pair in pairs)
    return pairs[0]._replace(by_length=dict(zip(lengths, inputs, strict=False)))


def pair_of(where: str, result: Any, problems: Sequence[str] = ()) -> Pair:
    """Convert a tuple to a pair. Raises PairError with all that is wrong, and with `problems`."""
    if not isinstance(result, tuple) or not 3 <= len(result) <= 5:
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise PairError(f"{where}: {EXPECTED}, got {got}")
    if problems := [*_problems(*result), *problems]:
        raise PairError("\n".join([f"{where}: {EXPECTED}", *(f"  {text}" for text in problems)]))
    reference, port, *rest = result
    pair = Pair(reference, as_module(port), *rest)
    call_reference, call_port = pair.calls or (None, None)
    return pair._replace(calls=(call_reference, as_call(port, call_port)))


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
        raise PairError(f"{place} does not import\n{of_user(error)}") from error


def of_user(error: BaseException) -> str:
    """Format the original error, with only those traceback lines that are in the user's files."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    lines = traceback.format_list(frames) + traceback.format_exception_only(error)
    return "".join(lines).rstrip()


def _is_users(file: str) -> bool:
    """Return whether a file belongs neither to this package nor to installed ones nor to Python."""
    paths = sysconfig.get_paths()
    installed = (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    others = (str(Path(__file__).parents[2]), *installed)
    return not file.startswith(("<", *others))


def _problems(
    reference: Any, port: Any, inputs: Any, layout: Any = None, calls: Any = None
) -> Iterator[str]:
    for name, value, kind, expected in (
        ("reference", reference, torch.nn.Module, "a torch.nn.Module"),
        ("layout", layout, Layout | None, "a Layout or None"),
    ):
        if not isinstance(value, kind):
            yield f"{name}: expected {expected}, got {type(value).__name__}"
    if why := why_no_port(port):
        yield f"port: {why}"
    if isinstance(inputs, tuple | Mapping):
        arrays: Any = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
        for which, a in arrays:
            if not isinstance(a, np.ndarray):
                yield f"inputs[{which!r}]: expected a NumPy array, got {type(a).__name__}"
            elif a.dtype.kind in "OSUmM":
                yield f"inputs[{which!r}]: expected numbers, got dtype {a.dtype}"
    else:
        yield f"inputs: expected a tuple or a dict of NumPy arrays, got {type(inputs).__name__}"
    is_pair = isinstance(calls, tuple) and len(calls) == 2
    if calls is not None and not (is_pair and all(c is None or callable(c) for c in calls)):
        yield f"calls: expected (reference_call, port_call), each a function or None, got {calls!r}"
