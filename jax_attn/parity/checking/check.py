"""Check a port against its reference: any torch module, any NNX module.

A verdict flows in one direction: the reference's side is prepared, the weights are compared,
canaries are tried on the reference, the port is run and judged.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flax import nnx

from jax_attn.parity.checking.arguments import ids_named, input_doubts, output_problems, validate
from jax_attn.parity.checking.canaries import (
    integers_left_out,
    probe_integers,
    probe_kept_outputs,
    small_features,
    try_canaries,
)
from jax_attn.parity.checking.chosen import chosen, note
from jax_attn.parity.checking.estimate import announce_memory, shown
from jax_attn.parity.checking.prepared import Prepared, judge_port
from jax_attn.parity.checking.unreached import unreached
from jax_attn.parity.checking.weights import compare_weights
from jax_attn.parity.judge.compare import Verdict
from jax_attn.parity.judge.result import Result, StandingNote
from jax_attn.parity.judge.text import joined, quoted
from jax_attn.parity.run import TRANSFORMS
from jax_attn.parity.run.inputs_and_runs import Inputs
from jax_attn.parity.run.port import Port, float_dtype
from jax_attn.parity.run.reference import Reference
from jax_attn.transfer import Layout


def check(
    reference: torch.nn.Module,
    port: nnx.Module,
    inputs: tuple[np.ndarray, ...] | Mapping[str, np.ndarray],
    *,
    layout: Layout | None = None,
    reference_call: Callable[..., Any] | None = None,
    port_call: Callable[..., Any] | None = None,
    dtype: str = "float32",
    gradients: bool = True,
    transforms: Sequence[str] = ("eager", "jit"),
    seed: int = 0,
    strict: bool = False,
    parameters: str | tuple[str, ...] | None = None,
) -> Result:
    """Whether `port` computes what `reference` does, within what rounding allows.

    reference, port: both with their weights in place and in `dtype`; copies are run, neither
        is changed. The check loads no weights: that would hide a bad transfer.
    inputs: NumPy arrays given to both sides, positional (a tuple) or by keyword (a dict);
        floating ones are rounded to `dtype`.
    layout: the transfer table between the two. With it the weights are compared first, bit for
        bit, and parameter gradients pair by it; without it the result says that neither was.
    reference_call, port_call: `(module, *args, **inputs) -> array | {name: array}`, where a
        side is called in its own way: masks, axis order, static arguments, several outputs.
        `reference_call` may be called in two threads at once, each with a module of its own.
    gradients: compare those of the floating inputs (and, with a layout, of the parameters)
        against one seeded cotangent for each output.
    seed: of the cotangents.
    transforms: how the port is run: some of eager, jit, grad, vmap, remat.
    strict: notes are doubts, so that the verdict is INCONCLUSIVE where anything was not compared
        that these arguments could show. Standing notes, which no input could remove, stay notes:
        on which shapes and under which transforms the port was run, a precision that is pinned, a
        gradient that is zero in theory.

    parameters: of which parameters gradients are compared and kept, in a large model: a pattern
        of the reference's names, as "encoder.layer.0.*" (`fnmatch`), or a tuple of several; None:
        all. A note says how many of how many.

    The oracle is the reference in float64, narrowing casts refused; the budget is the spread of
    perturbed float64 runs (`jax_attn.parity.judge.budget`). The reference is run as it is, under
    grad and in inference mode, and held to the same budget. A bug that these inputs would not
    reveal makes the verdict INCONCLUSIVE, and is named with what would
    (`jax_attn.parity.checking.canaries`).

    What a call changes is compared too: running statistics that the table pairs, as by
    `row("bn.running_mean", "bn.mean")`, and the outputs of a second call from there; what no row
    pairs is named in a note (`jax_attn.parity.checking.state`). So are parameters that no input
    reaches, whose gradient is zero everywhere.

    If the perturbed runs take over 20 s, stderr shows how many are done; if the check needs more
    than half of the free memory, a line there says so.

    Raises TypeError or ValueError for arguments that cannot be checked, naming each, and
    `RaisedError`, a ValueError, where a side raises an error on its inputs: its `__cause__`.
    """
    flags = {"gradients": gradients, "strict": strict}
    calls = {"reference_call": reference_call, "port_call": port_call}
    validate(reference, port, layout, dtype, transforms, seed, flags, calls)
    both_given = Inputs.of(inputs, float_dtype(dtype))
    names = None if parameters is None else chosen(reference, parameters)
    called = Reference(reference, reference_call, both_given, names)
    prepared = Prepared(called, dtype, gradients=gradients, seed=seed, watch=shown)
    with ids_named(called):
        outputs = prepared.inference
    if problems := output_problems(called, outputs):
        raise ValueError("\n".join(problems))
    if not called.repeats(dtype, outputs):
        raise ValueError(
            "reference: expected the same outputs each time, got others on the same inputs; is it "
            "in training mode, with dropout? call .eval() first"
        )
    announce_memory(reference)
    weights = compare_weights(reference, port, layout)
    passed_over = weights.passed_over
    limited: tuple[str, ...] = ()
    if names is not None:
        passed_over |= dict(reference.named_parameters()).keys() - names
        limited = (note(reference, names),) if weights.to_torch and gradients else ()
    called_port = Port(port, port_call, both_given)
    left_out = integers_left_out(called)

    def judged(prepared: Prepared) -> Result:
        doubts, not_tried = try_canaries(prepared)
        kind = "gradient of parameter"
        exact = prepared.exact.kinds[kind]
        compared = {name: exact[name] for name in exact if name not in passed_over}
        not_reached = unreached(compared, prepared.budgets[kind])
        as_jax = (StandingNote(_AS_JAX.format(dtype)),) if prepared.as_jax else ()
        small = small_features(prepared)
        notes = (*weights.notes, *limited, *not_tried, *small, *not_reached, *as_jax)
        result = judge_port(
            prepared,
            called_port,
            transforms,
            to_torch=weights.to_torch,
            paired=weights.paired,
            passed_over=passed_over,
            failures=weights.differences,
            doubts=(*input_doubts(called), *doubts),
            notes=(*notes, scope(both_given, transforms, left_out)),
        )
        if result.verdict is Verdict.FAIL:
            return result
        probed = probe_integers(prepared, called_port, transforms)
        kept = probe_kept_outputs(prepared, called_port, transforms)
        failures = (*probed.failures, *kept)
        return replace(result, failures=failures, notes=(*probed.notes, *result.notes))

    result = prepared.judged_again(judged(prepared), judged)
    return result.strict() if strict else result


_AS_JAX = (
    "what fails the budget of sums and softmaxes in float32, as torch has them, is judged by that "
    "of {}, in which JAX adds up a bias's gradient, flax's layers keep a product before they add "
    "its bias, and jax.nn.softmax stores its steps"
)


def scope(inputs: Inputs, transforms: Sequence[str], left_out: Sequence[str] = ()) -> StandingNote:
    """What the port was run on and under, and what it was not: a fault may show only there.

    left_out: inputs that the reference may be called without.
    """
    arrays = inputs.named(inputs.args, inputs.kwargs)
    shapes = [f"{f'input {name}' if inputs.args else name} {a.shape}" for name, a in arrays.items()]
    without = [f"calls without {quoted(left_out)}"] if left_out else []
    others = ["other shapes", *without, *(name for name in TRANSFORMS if name not in transforms)]
    at = joined(shapes or ["no inputs"])
    return StandingNote(
        f"checked at {at} under {joined(transforms)}: {joined(others)} were not run"
    )
