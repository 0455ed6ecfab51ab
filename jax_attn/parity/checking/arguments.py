"""Find every reason why arguments cannot be checked, or why a check of them is meaningless."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jax_attn.dtypes import DTYPES
from jax_attn.parity.checking.fixed import Problems
from jax_attn.parity.judge.finding import Finding
from jax_attn.parity.judge.text import joined
from jax_attn.parity.run import TRANSFORMS
from jax_attn.parity.run.inputs_and_runs import Arrays, Inputs, is_float
from jax_attn.parity.run.placement import type_problems as type_problems_of_mesh
from jax_attn.parity.run.port import x64_is_on
from jax_attn.transfer import Layout
from jax_attn.transfer.arrays import describe
from jax_attn.transfer.kinds.held import why_no_port
from jax_attn.transfer.table.layout import LAYOUT_HINT

if TYPE_CHECKING:
    import torch

    from jax_attn.parity.checking.prepared import Prepared
    from jax_attn.parity.run.reference import Reference


def reference_problems(
    reference: Any, dtype: Any, gradients: Any, seed: Any, reference_call: Any
) -> Problems:
    """Return why a reference cannot be prepared with these arguments, whatever the port."""
    types = type_problems(reference=reference)
    if isinstance(reference, str | os.PathLike):
        types[0] += "; parity.load_golden reads a folder that Golden.save wrote"
    types += flag_problems({"gradients": gradients})
    types += call_problems({"reference_call": reference_call}) + seed_type_problems(seed)
    if types:
        return Problems(types, [])
    return Problems([], seed_problems(seed) + dtype_problems(reference, dtype))


def port_problems(
    port: Any,
    layout: Any,
    transforms: Any,
    strict: Any,
    port_call: Any,
    on_mesh: tuple[Any, Any],
) -> Problems:
    """Return why a port cannot be judged with these arguments. on_mesh: the mesh and the specs."""
    types = type_problems(port=port, **({} if layout is None else {"layout": layout}))
    types += [*type_problems_of_mesh(*on_mesh), *flag_problems({"strict": strict})]
    types += call_problems({"port_call": port_call})
    is_list = isinstance(transforms, Sequence) and not isinstance(transforms, str)
    if not is_list or not transforms or any(name not in TRANSFORMS for name in transforms):
        known = ", ".join(TRANSFORMS)
        text = f"transforms: expected a tuple of some of {known}, got {transforms!r}"
        return Problems(types, [text])
    return Problems(types, [])


def type_problems(**sides: Any) -> list[str]:
    """Return a line for each of `reference`, `port` and `layout` that is of another type."""
    whys = {"reference": _why_no_reference, "port": why_no_port, "layout": _why_no_layout}
    return [f"{name}: {why}" for name, value in sides.items() if (why := whys[name](value))]


def _why_no_reference(value: Any) -> str:
    torch = sys.modules.get("torch")  # if it is not imported, nobody holds a module of it
    if torch is not None and isinstance(value, torch.nn.Module):
        return ""
    which = "" if why_no_port(value) else ", which is a port"
    return f"expected a torch.nn.Module, got {type(value).__name__}{which}"


def _why_no_layout(value: Any) -> str:
    if isinstance(value, Layout):
        return ""
    return f"expected a Layout, got {type(value).__name__}; {LAYOUT_HINT}"


def flag_problems(flags: Mapping[str, Any]) -> list[str]:
    """Return a line for each of the arguments that is not True or False."""
    return [
        f"{name}: expected True or False, got {value!r}"
        for name, value in flags.items()
        if not isinstance(value, bool | np.bool_)
    ]


def call_problems(calls: Mapping[str, Any]) -> list[str]:
    """Return a line for each of the `_call` arguments that is not a function."""
    return [
        f"{name}: expected a function (module, *args, **inputs) or None, got {call!r}"
        for name, call in calls.items()
        if call is not None and not callable(call)
    ]


def seed_type_problems(seed: Any) -> list[str]:
    is_integer = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    return [] if is_integer else [f"seed: expected an integer of 0 or more, got {seed!r}"]


def seed_problems(seed: int) -> list[str]:
    return [f"seed: expected an integer of 0 or more, got {seed}"] if seed < 0 else []


def dtype_problems(reference: "torch.nn.Module", dtype: Any) -> list[str]:
    """Return why `dtype` cannot be prepared: unknown, or not the reference's."""
    if not isinstance(dtype, str) or dtype not in DTYPES:  # np.dtype("float32") equals its name
        return [f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}"]
    if uninitialized := _uninitialized(reference):
        return [
            f"reference: expected a module with all its tensors, got {joined(uninitialized)} "
            "uninitialized; call the module once"
        ]
    return [
        f"reference parameter {name!r}: expected {dtype}, got {p.dtype}; convert the module first"
        for name, p in reference.named_parameters()
        if p.is_floating_point() and describe(p).dtype != dtype
    ]


def _uninitialized(reference: "torch.nn.Module") -> list[str]:
    """Return the names of the tensors of torch's lazy layers that have no shape yet."""
    is_lazy = sys.modules["torch"].nn.parameter.is_lazy
    tensors = (*reference.named_parameters(), *reference.named_buffers())
    return [name for name, tensor in tensors if is_lazy(tensor)]


def x64_problems(dtype: Any) -> list[str]:
    """Return why ports in `dtype` cannot be judged: JAX narrows it."""
    if dtype != "float64" or x64_is_on():
        return []
    return [
        "dtype: float64 needs JAX's x64 mode, got x64 off, which silently narrows to float32; "
        'call jax.config.update("jax_enable_x64", True) before the port is built'
    ]


# --- arguments that can be run, but show nothing --------------------------------------------------


def narrowed_problems(inputs: Inputs) -> list[str]:
    """Return a line for each integer input that changes when JAX narrows it without x64 mode."""
    problems = []
    for name, a in inputs.by_name.items():
        if a.dtype.kind not in "iu":
            continue
        held = jax.dtypes.canonicalize_dtype(a.dtype)
        if not np.array_equal(a.astype(held), a):
            problems.append(
                f"inputs[{name!r}]: expected integers that fit {held}, to which JAX narrows "
                f"{a.dtype} without its x64 mode, got {a.min()} to {a.max()}"
            )
    return problems


def output_problems(reference: "Reference", outputs: Arrays) -> list[str]:
    """Return why outputs of a reference cannot be compared: complex, only integers, all empty."""
    problems = []
    if complex_ones := sorted(k for k, a in outputs.items() if a.dtype.kind == "c"):
        problems.append(
            f"reference: expected real outputs, got complex ones, {complex_ones}; pass a "
            "reference_call and a port_call that return their real and imaginary parts"
        )
    decided = {k: a for k, a in outputs.items() if k not in complex_ones}
    other = {k: a.dtype.name for k, a in decided.items() if not is_float(a.dtype)}
    if other and len(other) == len(decided):
        problems.append(
            f"reference: expected floating-point outputs, got {other}: decisions, such as an "
            "argmax, may differ in a correct port if two scores are equal up to rounding, so they "
            "are compared only with others; pass a reference_call and a port_call that also "
            "return the scores on which the decision is based"
        )
    if all(a.size == 0 for a in outputs.values()):
        shapes = {k: a.shape for k, a in outputs.items()}
        given = reference.inputs.by_name.items()
        empty = [f"{name} of shape {a.shape}" for name, a in given if not a.size]
        why = f": inputs {joined(empty)} hold no numbers" if empty else ""
        problems.append(f"reference: expected outputs that hold numbers, got {shapes}{why}")
    return problems


def input_doubts(prepared: "Prepared") -> tuple[Finding, ...]:
    """Return a doubt for each input or weight with NaN or infinity, which hide other numbers.

    An input that may be added to the scores as a mask may hold -inf.
    """
    given = prepared.inputs.by_name
    weights = (
        (name, p.detach().double().cpu().numpy())
        for name, p in prepared.reference.module.named_parameters()
        if not p.isfinite().all()
    )
    return (
        *(line for k, a in given.items() for line in _not_finite(f"input {k!r}", a)),
        *(line for k, a in weights for line in _not_finite(f"parameter {k!r}", a)),
    )


def _not_finite(label: str, a: np.ndarray) -> Iterator[Finding]:
    if not is_float(a.dtype):
        return
    is_nan, is_inf = np.isnan(a), np.isinf(a)
    is_mask = label.startswith("input") and not (a > 0).any()
    counts = {"NaN": int(is_nan.sum()), "infinite": 0 if is_mask else int(is_inf.sum())}
    if held := [f"{count} {kind}" for kind, count in counts.items() if count]:
        yield Finding(
            "input-not-finite",
            f"{label} holds {joined(held)} of {a.size} numbers: results computed from them show "
            "nothing about the port; use finite numbers",
        )
