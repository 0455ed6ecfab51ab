"""Say more than the numbers of a port on a mesh: what its devices send and hold.

The port is also run on one device. A sum over the shards of a mesh is a sum in another order, and
may err by the budget, which allows any order.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jax_attn.parity.judge.finding import StandingNote
from jax_attn.parity.judge.text import joined
from jax_attn.parity.run.inputs_and_runs import Arrays
from jax_attn.parity.run.port import Port, full_precision
from jax_attn.parity.run.traffic import sent, total
from jax_attn.transfer import flatten


def notes_on_mesh(port: Port, dtype: str, cotangents: Arrays) -> tuple[StandingNote, ...]:
    """Return every note on a port's programs; none if it is not on a mesh."""
    if port.placement is None:
        return ()
    with full_precision():
        programs = port.programs(dtype, cotangents)
    return (*told(port, programs), *replicated(port, programs))


def told(port: Port, programs: Mapping[str, jax.stages.Compiled]) -> Iterator[StandingNote]:
    """Yield notes on what the port's programs send between devices, and what each device holds."""
    assert port.placement is not None
    for name, program in programs.items():
        memory: Any = program.memory_analysis()
        sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes)
        holds = f"{sizes[0]} bytes of arguments, {sizes[1]} of results"
        holds += f", {memory.temp_size_in_bytes} of temporaries"
        sends = f"{name}, {port.placement.words}: {_sends(program)}"
        yield StandingNote("traffic", f"{sends}; each holds {holds}")


def replicated(port: Port, programs: Mapping[str, jax.stages.Compiled]) -> Iterator[StandingNote]:
    """Yield notes on gradients that are sharded less than their parameter or input."""
    program = programs.get("forward and backward")
    if program is None:
        return
    _, (of_params, of_floats) = program.output_shardings
    gradients = flatten(of_params) | {f"input {name}": lie for name, lie in of_floats.items()}
    for name, array in port.arrays().items():
        if (lies := gradients.get(name)) is None:
            continue
        expected, got = (each.shard_shape(array.shape) for each in (array.sharding, lies))
        if math.prod(got) > math.prod(expected):
            text = f"each device holds shape {got} of it, and {expected} of {name} itself"
            yield StandingNote("gradient-replicated", f"grad {name}: {text}")


def _sends(program: jax.stages.Compiled) -> str:
    operations = sent(program.as_text() or "")
    each = []
    for kind in dict.fromkeys(operation.kind for operation in operations):
        alike = [operation for operation in operations if operation.kind == kind]
        count, size = sum(operation.times for operation in alike), total(alike)
        each.append(f"{count} {kind} with results of {size} bytes")
    return f"sends {joined(each)}" if each else "sends nothing"
