"""Find every reason why arguments cannot be checked, or why a check of them is meaningless."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

from jax_attn.dtypes import DTYPES
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.judge.finding import Finding
from jax_attn.parity.judge.result import Result
from jax_attn.parity.judge.text import joined
from jax_attn.parity.run import TRANSFORMS
from jax_attn.parity.run.call_side import RaisedError
from jax_attn.parity.run.inputs_and_runs import Arrays, Inputs, is_float, named_outputs
from jax_attn.parity.run.modes.float64_mode import TORCH_DTYPES
from jax_attn.parity.run.placement import type_problems as type_problems_of_mesh
from jax_attn.parity.run.port import x64_is_on
from jax_attn.parity.run.reference import Reference
from jax_attn.transfer import Layout
from jax_attn.transfer.table.layout import LAYOUT_HINT

_MODULES: dict[type, str] = {torch.nn.Module: "a torch.nn.Module", nnx.Module: "an nnx.Module"}


def validate(
    reference: Any,
    port: Any,
    layout: Any,
    dtype: Any,
    transforms: Any,
    seed: Any,
    flags: Mapping[str, Any],
    calls: Mapping[str, Any],
    on_mesh: tuple[Any, Any] = (None, None),
) -> None:
    """Raise TypeError or ValueError with every reason why these arguments cannot be checked.

    flags, calls: values by argument name. on_mesh: the mesh and the specs.
    """
    problems = type_problems(reference, port, *([] if layout is None else [layout]))
    problems += type_problems_of_mesh(*on_mesh)
    problems += [
        f"{name}: expected True or False, got {value!r}"
        for name, value in flags.items()
        if not isinstance(value, bool | np.bool_)
    ]
    if problems := problems + call_problems(calls) + seed_type_problems(seed):
        raise TypeError("\n".join(problems))
    problems = seed_problems(seed)
    is_list = isinstance(transforms, Sequence) and not isinstance(transforms, str)
    if not is_list or not transforms or any(name not in TRANSFORMS for name in transforms):
        known = ", ".join(TRANSFORMS)
        problems.append(f"transforms: expected a tuple of some of {known}, got {transforms!r}")
    if problems := problems + dtype_problems(reference, dtype):
        raise ValueError("\n".join(problems))


def type_problems(*sides: Any) -> list[str]:
    """Return a line for each of a reference, a port and a layout, in this order, of wrong type."""
    kinds = {"reference": torch.nn.Module, "port": nnx.Module, "layout": Layout}
    names = {**_MODULES, Layout: "a Layout"}
    hints: dict[type, str] = {Layout: f"; {LAYOUT_HINT}"}
    return [
        f"{name}: expected {names[kind]}, got {_of_type(value)}{hints.get(kind, '')}"
        for (name, kind), value in zip(kinds.items(), sides, strict=False)
        if not isinstance(value, kind)
    ]


def _of_type(value: Any) -> str:
    """Return the name of a value's type and, if it is a module, its framework."""
    which = next((f", {name}" for kind, name in _MODULES.items() if isinstance(value, kind)), "")
    return f"{type(value).__name__}{which}"


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


def dtype_problems(reference: torch.nn.Module, dtype: Any) -> list[str]:
    """Return why `dtype` cannot be checked: unknown, narrowed by JAX, or not the reference's."""
    if not isinstance(dtype, str) or dtype not in DTYPES:  # np.dtype("float32") equals its name
        return [f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}"]
    problems = [
        f"reference parameter {name!r}: expected {dtype}, got {p.dtype}; convert the module first"
        for name, p in reference.named_parameters()
        if p.is_floating_point() and p.dtype != TORCH_DTYPES[dtype]
    ]
    if dtype == "float64" and not x64_is_on():
        problems.insert(
            0,
            "dtype: float64 needs JAX's x64 mode, got x64 off, which silently narrows to float32; "
            'call jax.config.update("jax_enable_x64", True) before the port is built',
        )
    return problems


def chosen(module: torch.nn.Module, patterns: str | Sequence[str]) -> frozenset[str]:
    """Return the names of the parameters that match any of the `fnmatch` patterns.

    Raises TypeError if the patterns are not strings, and ValueError naming each that matches none.
    """
    listed = [patterns] if isinstance(patterns, str) else patterns
    is_list = isinstance(listed, list | tuple)
    if not is_list or not listed or not all(isinstance(pattern, str) for pattern in listed):
        expected = "a pattern of parameter names or a tuple of such patterns"
        raise TypeError(f"parameters: expected {expected}, got {patterns!r}")
    names = [name for name, _ in module.named_parameters()]
    problems = []
    for pattern in listed:
        if not any(fnmatchcase(name, pattern) for name in names):
            nearest = get_close_matches(pattern, names, n=3, cutoff=0) or ["none"]
            problems.append(
                f"parameters: expected a pattern of the reference's parameters, got {pattern!r}, "
                f"which matches none of {len(names)}; nearest: {', '.join(nearest)}"
            )
    if problems:
        raise ValueError("\n".join(problems))
    return frozenset(
        name for name in names if any(fnmatchcase(name, pattern) for pattern in listed)
    )


def selected(names: frozenset[str], total: int) -> Finding:
    """Return a note that says how many of how many gradients are compared."""
    return Finding(
        "parameters-selected",
        f"the gradients of {len(names)} of {total} parameters were compared: those that the "
        "argument `parameters` selects",
    )


# --- arguments that can be run, but show nothing --------------------------------------------------


def narrowed_problems(inputs: Inputs) -> list[str]:
    """Return a line for each integer input that changes when JAX narrows it without x64 mode."""
    problems = []
    arrays = inputs.named(inputs.args, inputs.kwargs)
    for name, a in ((name, a) for name, a in arrays.items() if a.dtype.kind in "iu"):
        held = jax.dtypes.canonicalize_dtype(a.dtype)
        if not np.array_equal(a.astype(held), a):
            problems.append(
                f"inputs[{name!r}]: expected integers that fit {held}, to which JAX narrows "
                f"{a.dtype} without its x64 mode, got {a.min()} to {a.max()}"
            )
    return problems


def output_problems(reference: Reference, outputs: Arrays) -> list[str]:
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
        given = reference.inputs.named(reference.inputs.args, reference.inputs.kwargs)
        empty = [f"{name} of shape {a.shape}" for name, a in given.items() if not a.size]
        why = f": inputs {joined(empty)} hold no numbers" if empty else ""
        problems.append(f"reference: expected outputs that hold numbers, got {shapes}{why}")
    return problems


def gradient_problems(prepared: Prepared, result: Result) -> list[str]:
    """Return why failing gradients cannot be compared: no output of the reference has a gradient.

    This is tested only if nothing but gradients fails, since it takes a forward pass. A port
    without a gradient passes too: both are zero.
    """
    failed = {report.kind for report in result.tensors if report.verdict is Verdict.FAIL}
    if result.failures or not failed or any(not kind.startswith("gradient") for kind in failed):
        return []
    return [] if prepared.fact(has_gradient) else [_NO_GRADIENT]


def has_gradient(prepared: Prepared) -> bool:
    """Return whether an output of the reference has a gradient."""
    reference, have_gradients = prepared.reference, list[bool]()

    def call(module: torch.nn.Module, *args: Any, **inputs: Any) -> Any:
        outputs = (reference.call or torch.nn.Module.__call__)(module, *args, **inputs)
        named = named_outputs(outputs, torch.Tensor, "reference")
        have_gradients.extend(x.requires_grad for x in named.values())
        return outputs

    reference.called(call).run(prepared.dtype, {})
    return any(have_gradients)


_NO_GRADIENT = (
    "reference: expected outputs with a gradient, as the port's have, but requires_grad is False "
    "for all of them: the module or reference_call runs under torch.no_grad() or detaches them. "
    "Remove that, or pass gradients=False to compare only the outputs"
)


@contextlib.contextmanager
def ids_named(reference: Reference) -> Iterator[None]:
    """Add to an index error of a run the integer inputs that lie outside of an embedding's rows.

    They are searched only after an error, because it is unknown which input goes to which
    embedding.
    """
    try:
        yield
    except RaisedError as error:
        outside = list(_outside(reference)) if isinstance(error.__cause__, IndexError) else []
        if not outside:
            raise
        raise RaisedError("; ".join([str(error), *outside])) from error.__cause__


def _outside(reference: Reference) -> Iterator[str]:
    inputs = reference.inputs
    for label, a in inputs.named(inputs.args, inputs.kwargs).items():
        if a.dtype.kind not in "iu" or not a.size:
            continue
        for name, table in reference.module.named_modules():
            rows = table.num_embeddings if isinstance(table, torch.nn.Embedding) else 0
            if rows and not 0 <= a.min() <= a.max() < rows:
                yield (
                    f"input {label!r} holds {a.min()} to {a.max()}, but the embedding {name!r} "
                    f"has rows 0 to {rows - 1}"
                )


def input_doubts(prepared: Prepared) -> tuple[Finding, ...]:
    """Return a doubt for each input or weight with NaN or infinity, which hide other numbers.

    An input that may be added to the scores as a mask may hold -inf.
    """
    inputs = prepared.inputs
    given = inputs.named(inputs.args, inputs.kwargs)
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
