"""Say more than the numbers of a port on a mesh: what its devices send and hold.

The port is also run on one device. A sum over the shards of a mesh is a sum in another order, and
may err by the budget, which allows any order.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jax_attn.parity.judge.finding import Finding, StandingNote
from jax_attn.parity.judge.text import joined
from jax_attn.parity.run.inputs_and_runs import Arrays
from jax_attn.parity.run.port import Port, full_precision
from jax_attn.parity.run.traffic import sent, total
from jax_attn.transfer import flatten


def notes_on_mesh(port: Port, dtype: str, cotangents: Arrays) -> tuple[Finding, ...]:
    """Return every note on a port's programs and inputs; none if it is not on a mesh."""
    if port.placement is None:
        return ()
    with full_precision():
        programs = port.programs(dtype, cotangents)
    return (*equal_shares(port), *told(port, programs), *replicated(port, programs))


def equal_shares(port: Port) -> Iterator[Finding]:
    """Yield a note on each mask that counts as many tokens on every device, if an output is a loss.

    The mean of the devices' means is then the mean of all tokens. A loss is one number.
    """
    assert port.placement is not None
    if 1 not in port.sizes_of_outputs.values():
        return
    inputs = port.inputs.by_name
    most = max((length for a in inputs.values() for length in a.shape), default=0)
    for name, a in inputs.items():
        if (counted := _counted(a, most)) is None:
            continue
        places = port.placement.put_input(name, a).sharding.devices_indices_map(a.shape).values()
        counts = {str(place): counted[place].sum() for place in places if place is not None}
        if len(counts) > 1 and len({*counts.values()}) == 1:
            yield Finding(
                "equal-shares",
                f"every device counts {next(iter(counts.values()))} tokens in its share of input "
                f"{name!r}, so a mean of the devices' means would pass for the mean of all tokens; "
                "use rows of different lengths on each device",
            )


def _counted(a: np.ndarray, most: int) -> np.ndarray | None:
    """Return by how much each number of an input adds to a count of tokens; None if it is no mask.

    A mask holds 0 and 1, labels are negative where they do not count, and lengths are at most the
    longest axis, `most`.
    """
    if not a.size or not a.ndim:
        return None
    if ((a == 0) | (a == 1)).all():
        return a.astype(np.int64)
    if a.dtype.kind not in "iu":
        return None
    if (a < 0).any():
        return (a >= 0).astype(np.int64)
    return a if a.ndim == 1 and a.max() <= most else None


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
