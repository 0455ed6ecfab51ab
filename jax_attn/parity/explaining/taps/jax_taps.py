"""Record the tensors that a JAX function computes, equation by equation."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.extend import source_info_util

from jax_attn.parity.explaining.taps.recording import (
    Name,
    Operation,
    Recording,
    UnwrittenError,
    written,
)
from jax_attn.parity.explaining.taps.tap import LEAVES, Place, Tap

_MOST_STEPS = 64
"""The largest number of steps of a scan that are recorded; a longer scan counts as one equation."""
_CALLS = {
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
"""Primitive that only calls another program -> the parameter that holds the program."""

_WRITTEN = {"add_any": "add"}
"""Primitive that `jax.lax` lacks -> the primitive there that gives the same."""


class Traced(NamedTuple):
    """A value of a run.

    taps: those from which it is computed; for a floating-point value, its own. slot: its number
    among the values of the run.
    """

    value: Any
    taps: tuple[int, ...]
    slot: int


class JaxOperation(NamedTuple):
    """An operation that can be run again.

    compute: maps its operands to a list of results. given, results: their slots.
    """

    compute: Callable[..., Sequence[Any]]
    given: tuple[int, ...]
    results: tuple[int, ...]


class TappedProgram:
    """The equations of a function, which can be run again with some tensors replaced.

    The function's first argument holds the parameters; the others are inputs.

    Attributes:
      outputs: name -> the tap of the output; for an integer, the taps from which it is computed.
    """

    def __init__(self, function: Callable[..., dict[str, jax.Array]], *args: Any):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        self._jaxpr, self._consts = closed.jaxpr, closed.consts
        leaves = jax.tree_util.tree_leaves_with_path(args)
        self._args = [(LEAVES[path[0].idx > 0], _name(path), a) for path, a in leaves]
        self._names = sorted(shapes)
        self.outputs: dict[str, tuple[int, ...]] = {}

    @cached_property
    def base(self) -> "JaxRun":
        """The run in which nothing is replaced."""
        return self.run({})

    def run(self, replaced: Mapping[int, np.ndarray]) -> "JaxRun":
        """Run the whole program.

        replaced: tap -> the value with which the run continues in its place.
        """
        run = JaxRun(replaced)
        consts = [run.leaf("input", "", a) for a in self._consts]
        given = [run.leaf(op, name, a) for op, name, a in self._args]
        outs = run.equations(self._jaxpr, consts, given, "")
        self.outputs = {n: traced.taps for n, traced in zip(self._names, outs, strict=True)}
        return run


class JaxRun:
    """One run of a program.

    Attributes:
      taps: every floating-point tensor.
      arrays: the arrays of the taps.
      recording: every operation.
      values: every value, by its slot.
      steps: every operation, to run it again.
      taps_in: slot -> the tap whose value it holds.
    """

    def __init__(self, replaced: Mapping[int, np.ndarray]):
        self.taps: list[Tap] = []
        self.arrays: list[jax.Array] = []
        self.recording = Recording(id)
        self.values: list[Any] = []
        self.steps: list[JaxOperation] = []
        self.taps_in: dict[int, int] = {}
        self._equations: dict[Hashable, list[int]] = defaultdict(list)
        self._equation_of: dict[int, Hashable] = {}
        self._replaced = replaced

    @cached_property
    def slots(self) -> list[int]:
        """The slot of each tap."""
        return list(self.taps_in)

    def of_equation(self, index: int) -> list[int]:
        """Return the taps of the same place in the source as a tap, in any step or layer."""
        return self._equations[self._equation_of[index]] if index in self._equation_of else [index]

    def leaf(self, op: str, name: str, value: Any) -> Traced:
        return self._traced(value, op, name, "", ())

    def equations(
        self, jaxpr: jex.Jaxpr, consts: list[Traced], given: list[Traced], inside: str
    ) -> list[Traced]:
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *given), strict=True))

        def read(atom: Any) -> Traced:
            return self._known(atom.val) if isinstance(atom, jex.Literal) else known[atom]

        for equation in jaxpr.eqns:
            results = self._results(equation, list(map(read, equation.invars)), inside)
            known |= zip(equation.outvars, results, strict=True)
        return list(map(read, jaxpr.outvars))

    def _results(self, equation: jex.JaxprEqn, given: list[Traced], inside: str) -> list[Traced]:
        name, params = equation.primitive.name, equation.params
        if name in _CALLS:
            return self._called(params[_CALLS[name]], given, inside)
        if name == "scan" and params["length"] <= _MOST_STEPS:
            return self._scanned(params, given, inside)
        if name == "cond":
            branch = params["branches"][int(given[0].value)]
            return self._called(branch, given[1:], inside)
        bound = equation.primitive.get_bind_params(params)  # for a shard_map, they differ
        compute = partial(_computed, equation.primitive, bound)
        values = compute(*(x.value for x in given))
        made_of = tuple(dict.fromkeys(tap for x in given for tap in x.taps))
        source, first = _line(equation), len(self.taps)
        results = [self._traced(x, name, inside, source, made_of) for x in values]
        where = _frames(equation)
        for n, index in enumerate(range(first, len(self.taps))):
            key = (name, self.taps[index].shape, where, n)
            self._equations[key].append(index)
            self._equation_of[index] = key
        self._keep(compute, given, results)
        self._record(
            partial(_bound, name, params, [x.value for x in given]),
            results,
            str(Place(inside, source)),
            is_one=not equation.primitive.multiple_results,
        )
        return results

    def _record(
        self,
        call: Callable[[Name], str],
        results: Sequence[Traced],
        comment: str = "",
        *,
        is_one: bool = True,
    ) -> None:
        decides = not any(jnp.issubdtype(x.value.dtype, jnp.floating) for x in results)
        operation = Operation(call, decides, comment)
        self.recording.add(operation, [x.value for x in results], is_one=is_one)

    def _called(self, program: Any, given: list[Traced], inside: str) -> list[Traced]:
        if not isinstance(program, jex.ClosedJaxpr):
            return self.equations(program, [], given, inside)
        consts = [self._known(a) for a in program.consts]
        return self.equations(program.jaxpr, consts, given, inside)

    def _scanned(self, params: Mapping[str, Any], given: list[Traced], inside: str) -> list[Traced]:
        fixed, carried = params["num_consts"], params["num_carry"]
        consts, carry, over = (
            given[:fixed],
            given[fixed : fixed + carried],
            given[fixed + carried :],
        )
        steps = range(params["length"])
        each: dict[int, list[Traced]] = {}
        for step in reversed(steps) if params["reverse"] else steps:
            at = [self._taken(x, step) for x in over]
            label = f"{inside}step {step} of a scan"
            results = self._called(params["jaxpr"], [*consts, *carry, *at], label)
            carry, each[step] = results[:carried], results[carried:]
        stacked = []
        for n, aval in enumerate(params["jaxpr"].out_avals[carried:]):
            rows = [each[step][n] for step in steps]
            value = (
                jnp.stack([x.value for x in rows]) if rows else jnp.zeros((0, *aval.shape), aval)
            )
            made_of = tuple(dict.fromkeys(tap for x in rows for tap in x.taps))
            stacked.append(self._traced(value, "scan", inside, "", made_of))
            if rows:
                self._keep(lambda *rows: [jnp.stack(rows)], rows, stacked[-1:])
            self._record(partial(_stacked, [x.value for x in rows]), stacked[-1:])
        return [*carry, *stacked]

    def _taken(self, x: Traced, step: int) -> Traced:
        """Return the part that one step of a scan reads."""
        taken = Traced(x.value[step], x.taps, self._slot(x.value[step]))
        self._keep(lambda whole: [whole[step]], [x], [taken])
        self._record(lambda name: f"{name(x.value)}[{step}]", [taken])
        return taken

    def _traced(
        self, value: Any, op: str, module: str, source: str, made_of: tuple[int, ...]
    ) -> Traced:
        if not jnp.issubdtype(jnp.result_type(value), jnp.floating) or not math.prod(value.shape):
            return Traced(value, made_of, self._slot(value))
        index = len(self.taps)
        if index in self._replaced:
            value = jnp.asarray(self._replaced[index], value.dtype)
        self.taps.append(Tap(index, op, Place(module, source), wide(value), made_of))
        self.arrays.append(value)
        slot = self._slot(value)
        self.taps_in[slot] = index
        return Traced(value, (index,), slot)

    def _known(self, value: Any) -> Traced:
        """Return a value that no operation computes, and that is no leaf."""
        return Traced(value, (), self._slot(value))

    def _slot(self, value: Any) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _keep(
        self, compute: Callable[..., Any], given: Sequence[Traced], results: Sequence[Traced]
    ) -> None:
        slots = (tuple(x.slot for x in each) for each in (given, results))
        self.steps.append(JaxOperation(compute, *slots))


def wide(value: Any) -> np.ndarray:
    """Return an array of JAX in float64."""
    return np.asarray(value).astype(np.float64)


def _computed(primitive: jex.Primitive, params: Mapping[str, Any], *given: Any) -> Sequence[Any]:
    results = primitive.bind(*given, **params)
    return results if primitive.multiple_results else [results]


def _bound(op: str, params: Mapping[str, Any], given: Sequence[Any], name: Name) -> str:
    """Write an equation as Python. Raises UnwrittenError."""
    op = _WRITTEN.get(op, op)
    if not hasattr(jax.lax, f"{op}_p"):
        raise UnwrittenError
    arguments = [*map(name, given), *(f"{key}={written(x, _leaf)}" for key, x in params.items())]
    return f"lax.{op}_p.bind({', '.join(arguments)})"


def _stacked(rows: Sequence[Any], name: Name) -> str:
    return f"jnp.stack([{', '.join(map(name, rows))}])"


def _leaf(x: Any) -> str | None:
    """Write a parameter of an equation that `jax.lax` names, or that is a dtype; None otherwise."""
    if isinstance(x, Enum):
        return f"lax.{x}" if hasattr(jax.lax, type(x).__name__) else None
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return f"lax.{x}"
    return f"np.dtype({x.name!r})" if isinstance(x, np.dtype) else None


def _frames(equation: jex.JaxprEqn) -> Hashable:
    """Return the instructions that lead to an equation, which differ for two calls on one line."""
    traceback = equation.source_info.traceback
    if traceback is None:
        return None
    codes, instructions = traceback.raw_frames()
    return tuple(zip(map(id, codes), instructions, strict=True))


def _line(equation: jex.JaxprEqn) -> str:
    place = source_info_util.summarize(equation.source_info).partition(" ")[0]
    file, _, line = place.partition(":")
    return f"{Path(file).name}:{line.partition(':')[0]}" if line else ""


def _name(path: tuple[Any, ...]) -> str:
    keys = [getattr(key, "key", getattr(key, "name", getattr(key, "idx", ""))) for key in path]
    return ".".join(str(key) for key in keys[1:] if key != "value")
