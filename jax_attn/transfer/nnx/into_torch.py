"""Write a port's weights into a torch module, through the table: all of its tensors, or none."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_attn.transfer.arrays import as_torch, describe, same_bits, same_memory, why_unreadable
from jax_attn.transfer.problems import Problem, TransferError, nearest
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.rows import bindings, filled


def written_into(module: Any, arrays: Mapping[str, Any], layout: Layout) -> dict[str, np.ndarray]:
    """Write arrays, by the port's path, into a torch module. Return them by the module's names.

    Raises TypeError for anything but a torch module, and TransferError with every problem.
    """
    if not (hasattr(module, "state_dict") and hasattr(module, "named_parameters")):
        kind = type(module).__name__
        raise TypeError(f"into: expected a torch module to write into, got {kind}")
    state = {key: x for key, x in module.state_dict().items() if hasattr(x, "copy_")}
    tensors = layout.spelled_as(state).to_torch(arrays)
    for item in layout.passed_over:  # a module may hold apart what the table ties
        for binding in bindings([item.key], [*state]) if item.same_as else ():
            key, same_as = filled((item.key, item.same_as), binding)
            if same_as in tensors:
                tensors.setdefault(key, tensors[same_as])
    if problems := _problems(state, tensors, layout):
        raise TransferError("export into a torch module, nothing written", problems)
    exported = {key: np.array(tensor, order="C") for key, tensor in tensors.items()}
    for key, array in exported.items():
        state[key].copy_(as_torch(array))
    return exported


def _problems(
    state: Mapping[str, Any], tensors: Mapping[str, np.ndarray], layout: Layout
) -> list[Problem]:
    problems = []
    for key, tensor in tensors.items():
        if key not in state:
            text = "the torch module has no such parameter or buffer"
            problems.append(Problem("unexpected", key, text, nearest(key, state)))
        elif reason := why_unreadable(state[key]):
            problems.append(Problem("refused", key, f"the torch module holds {reason}"))
        elif (here := describe(state[key])) != (there := describe(tensor)):
            kind = "wrong dtype" if here.shape == there.shape else "wrong shape"
            problems.append(Problem(kind, key, f"the torch module holds {here}, the port {there}"))
    ties = same_memory(state, [key for key in state if not why_unreadable(state[key])])
    for key, first in ties.items():
        one, other = tensors.get(key), tensors.get(first)
        if one is not None and other is not None and not same_bits(one, other):
            text = f"the torch module ties it to {first!r}, and the port has other numbers for each"
            problems.append(Problem("ambiguous", key, text))
    written = {*tensors, *(first for key, first in ties.items() if key in tensors)}
    ignored = [item.key for item in layout.passed_over if not item.same_as]
    for key in state:
        if key in written or ties.get(key) in written or bindings(ignored, [key]):
            continue
        text = "the torch module has it, and the table gives nothing for it"
        problems.append(Problem("missing", key, text, f'add a row, or ignored("{key}", "why")'))
    return problems
