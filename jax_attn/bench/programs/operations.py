"""Find where a call spends its time, by module and kind of operation, with the profilers.

Times are the operations' own, on the thread that runs them. They are added up over layers, and
{layer} stands for the layer's number in a path. Operations of a backward pass belong to the module
whose operation they differentiate. A fusion of XLA counts as one operation, under the module and
kind of its last instruction.
"""

import contextlib
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeAlias

import jax
import torch
from flax import nnx

Operations: TypeAlias = tuple[tuple[str, str, float], ...]
"""(path of a module, kind of operation, seconds of a call), the longest first, REST last."""

MOST, CALLS = 12, 3
OPTIMIZER, REST = "optimizer", "all others"
_MARK = "module:"
# Name, operation, operands and origin of an instruction of a compiled program.
_INSTRUCTION = re.compile(
    r'^ *(?:ROOT )?%?([\w.-]+) = .*? ([a-z][\w-]*)\(([^)]*)\)(?:.*op_name="([^"]*)")?', re.MULTILINE
)
_PATH = re.compile(rf"{_MARK}([\w.]*)")
_KEY = re.compile(r"\[\\?'?(\w+)\\?'?\]")  # a parameter's keys: params['layers'][0]['kernel']
_AROUND = ("while", "conditional", "call")
"""Operations that contain others, whose time is counted with the contained instructions."""


def torch_operations(module: torch.nn.Module, call: Callable[[], object]) -> Operations:
    """Profile `call`, which runs the torch module once, with or without its backward pass."""
    with _marked(module), torch.profiler.profile() as profile:
        for _ in range(CALLS):
            call()
    spent: dict[tuple[str, str], float] = defaultdict(float)
    events: Any = profile.events()
    modules = [(event, _first(event, _module_of)) for event in events]
    # An operation of a backward pass has the number of the one that it differentiates.
    forward = {e.sequence_nr: path for e, path in modules if e.sequence_nr >= 0 and path}
    for event, path in modules:
        if not event.name.startswith(_MARK):
            path = path or _first(event, lambda e: forward.get(e.sequence_nr))
            spent[path, event.name] += event.self_cpu_time_total
    return _longest(spent, 1e-6)


@contextlib.contextmanager
def _marked(module: torch.nn.Module) -> Iterator[None]:
    """Mark for the profiler which module runs, within this context."""
    open_ranges: list[Any] = []

    def enter(path: str, *_: Any) -> None:
        open_ranges.append(torch.profiler.record_function(_MARK + path))
        open_ranges[-1].__enter__()

    def leave(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    hooks = [
        hook
        for path, part in module.named_modules()
        for hook in (
            part.register_forward_pre_hook(partial(enter, path)),
            part.register_forward_hook(leave),
        )
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _first(event: Any, of: Callable[[Any], str | None]) -> str:
    """Return what `of` says of the innermost event that it knows, or "" if it knows none."""
    while event is not None:
        if (found := of(event)) is not None:
            return found
        event = event.cpu_parent
    return ""


def _module_of(event: Any) -> str | None:
    if event.name.startswith(_MARK):
        return event.name.removeprefix(_MARK)
    return OPTIMIZER if event.name.startswith("Optimizer.step") else None  # torch's own mark


def jax_operations(program: str, call: Callable[[], object]) -> Operations:
    """Profile `call`. program: the text of the compiled program it runs, traced in `scoped`."""
    with tempfile.TemporaryDirectory(prefix="jax-attn-bench-") as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                call()
        (file,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
        places = _places(program)
        spent: dict[tuple[str, str], float] = defaultdict(float)
        for name, nanoseconds in _instructions(profile):
            kind, place = places.get(name, ("", ("", name)))
            if kind not in _AROUND:
                spent[place] += nanoseconds
    return _longest(spent, 1e-9)


def _places(program: str) -> dict[str, tuple[str, tuple[str, str]]]:
    """Map each instruction to its operation, and to its module's path and kind.

    A product that XLA created itself, with no origin, belongs to the module whose parameter it
    reads.
    """
    found = {name: rest for name, *rest in _INSTRUCTION.findall(program)}

    def read(operands: str) -> list[str]:
        """Return the modules of the parameters among the operands."""
        origins = (found[name][2] for name in re.findall(r"%([\w.-]+)", operands) if name in found)
        keys = (_KEY.findall(origin) for origin in origins if origin.startswith("params["))
        return [".".join(path[:-1]) for path in keys]

    places = {}
    for name, (operation, operands, origin) in found.items():
        paths = _PATH.findall(origin) if origin else read(operands)
        kind = origin.rpartition("/")[2] or operation
        places[name] = operation, (paths[-1] if paths else "", kind)
    return places


def _instructions(profile: Any) -> Iterable[tuple[str, float]]:
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                name = dict(event.stats).get("hlo_op")
                if name is not None:
                    yield str(name), event.duration_ns


def scope(path: str) -> contextlib.AbstractContextManager[Any]:
    """Name operations that are traced in this context after the module at `path`."""
    return jax.named_scope(_MARK + path)


@contextlib.contextmanager
def scoped(port: nnx.Module) -> Iterator[None]:
    """Name operations that are traced in this context after the module that runs them."""
    paths = {id(m): ".".join(map(str, path)) for path, m in nnx.iter_modules(port)}
    classes = {
        next(kind for kind in type(m).__mro__ if "__call__" in vars(kind))
        for _, m in nnx.iter_modules(port)
        if callable(m)
    }
    before: dict[Any, Any] = {kind: vars(kind)["__call__"] for kind in classes}

    def named(call: Any) -> Any:
        @wraps(call)
        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            with scope(paths.get(id(module), "")):
                return call(module, *args, **kwargs)

        return run

    for kind, call in before.items():
        kind.__call__ = named(call)
    try:
        yield
    finally:
        for kind, call in before.items():
            kind.__call__ = call


def _longest(spent: Mapping[tuple[str, str], float], unit: float) -> Operations:
    """Return the MOST longest operations per call, then the rest as REST; () if no time was spent.

    spent: times of CALLS calls. unit: the unit of `spent`, in seconds.
    """
    if not any(spent.values()):
        return ()
    merged: dict[tuple[str, str], float] = defaultdict(float)
    for (path, kind), time in spent.items():
        merged[re.sub(r"(?<=\.)\d+(?=\.|$)", "{layer}", path), kind] += time * unit / CALLS
    longest = sorted(merged, key=lambda key: -merged[key])
    rest = sum(merged[key] for key in longest[MOST:])
    return (*((*key, merged[key]) for key in longest[:MOST]), ("", REST, rest))
