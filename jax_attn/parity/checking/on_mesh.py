"""What is asked of a port on a mesh beside its numbers: equal copies, and what it sends and holds.

It is also run on one device: a sum over the parts of a mesh is one in another order, and may err by
what the budget has for any order.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax

from jax_attn.parity.judge.finding import Finding, StandingNote
from jax_attn.parity.judge.text import joined, quoted
from jax_attn.parity.run.inputs_and_runs import Run
from jax_attn.parity.run.port import Port
from jax_attn.parity.run.traffic import sent, total
from jax_attn.transfer import flatten


def on_one_device(port: Port) -> Port | None:
    """The same port on a mesh of one device; None where it lies on no mesh."""
    if port.placement is None:
        return None
    return replace(port, placement=port.placement.on_one_device)


def unlike_copies(run: Run, transform: str) -> Iterator[Finding]:
    """A failure where devices disagree on what should be one array."""
    if run.unlike:
        yield Finding(
            "unlike-copies",
            f"{transform}: devices hold other numbers of {quoted(run.unlike)}, which should be the "
            "same on each: is a sum over an axis of the mesh missing (jax.lax.psum), under a "
            "shard_map with check_vma=False?",
        )


def nothing_cut(port: Port) -> Iterator[Finding]:
    """A doubt where every device computes the whole."""
    if port.placement is None:
        return
    arrays = port.arrays()
    if all(a.sharding.is_fully_replicated for a in arrays.values()):
        whole = "mesh: nothing is cut, so that every device computes the whole; give specs="
        yield Finding("nothing-cut", whole)


def told(port: Port, programs: Mapping[str, jax.stages.Compiled]) -> Iterator[StandingNote]:
    """What the port's programs send between the mesh's devices, and what each of them holds."""
    assert port.placement is not None
    for name, program in programs.items():
        memory: Any = program.memory_analysis()
        sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes)
        holds = f"{sizes[0]} bytes of arguments, {sizes[1]} of results"
        holds += f", {memory.temp_size_in_bytes} of temporaries"
        sends = f"{name}, {port.placement.words}: {_sends(program)}"
        yield StandingNote("traffic", f"{sends}; each holds {holds}")


def replicated(port: Port, programs: Mapping[str, jax.stages.Compiled]) -> Iterator[StandingNote]:
    """Which gradients each device has a larger part of than of their parameter or input."""
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
