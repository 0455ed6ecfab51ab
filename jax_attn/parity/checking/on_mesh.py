"""What is asked of a port on a mesh beside its numbers: equal copies, and what it sends and holds.

It is also run on one device: a sum over the parts of a mesh is one in another order, and may err by
what the budget has for any order.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax

from jax_attn.parity.judge.result import StandingNote
from jax_attn.parity.judge.text import joined, quoted
from jax_attn.parity.run.inputs_and_runs import Run
from jax_attn.parity.run.port import Port
from jax_attn.parity.run.traffic import sent
from jax_attn.transfer import flatten

BESIDE = ", beside one device"
"""After the transform of a report on how a run on a mesh compares with one on a single device."""


def on_one_device(port: Port) -> Port | None:
    """The same port on a mesh of one device; None where it lies on no mesh."""
    if port.placement is None:
        return None
    return replace(port, placement=port.placement.on_one_device)


def unlike_copies(run: Run, transform: str) -> Iterator[str]:
    """A failure where devices disagree on what should be one array."""
    if run.unlike:
        yield (
            f"{transform}: devices hold other numbers of {quoted(run.unlike)}, which should be the "
            "same on each: is a sum over an axis of the mesh missing (jax.lax.psum), under a "
            "shard_map with check_vma=False?"
        )


def told(port: Port, programs: Mapping[str, jax.stages.Compiled]) -> Iterator[StandingNote]:
    """What the port's programs send between the mesh's devices, and what each of them holds."""
    assert port.placement is not None
    for name, program in programs.items():
        memory: Any = program.memory_analysis()
        sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes)
        holds = f"{sizes[0]} bytes of arguments, {sizes[1]} of results"
        holds += f", {memory.temp_size_in_bytes} of temporaries"
        yield StandingNote(f"{name}, {port.placement.words}: {_sends(program)}; each holds {holds}")


def replicated(port: Port, programs: Mapping[str, jax.stages.Compiled]) -> Iterator[str]:
    """Which gradients each device has a larger part of than of what they are the gradients of."""
    program = programs.get("forward and backward")
    if program is None:
        return
    (params, floats, *_), _ = program.input_shardings
    _, (of_params, of_floats) = program.output_shardings
    inputs = port.inputs.named(port.inputs.args, port.inputs.kwargs)
    lie = {f"input {name}": (inputs[name], floats[name], of_floats[name]) for name in floats}
    cut, cut_gradients = flatten(params), flatten(of_params)
    lie |= {path: (a, cut[path], cut_gradients[path]) for path, a in flatten(port.module).items()}
    for name, (array, own, gradient) in lie.items():
        expected, got = (each.shard_shape(array.shape) for each in (own, gradient))
        if math.prod(got) > math.prod(expected):
            yield f"grad {name}: each device holds {got} of it, and {expected} of what it is of"


def _sends(program: jax.stages.Compiled) -> str:
    operations = sent(program.as_text() or "")
    counts = Counter(each.kind for each in operations)
    if not counts:
        return "sends nothing"
    each = [
        f"{count} {kind} of {sum(o.bytes for o in operations if o.kind == kind)} bytes"
        for kind, count in counts.items()
    ]
    return f"sends {joined(each)}"
