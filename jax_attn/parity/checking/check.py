"""Check a port against its reference, for any torch module and a port of any kind.

The steps follow one another: prepare the reference's side, compare the weights, let probes say what
the inputs could not reveal, run the port and judge it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh, PartitionSpec

from jax_attn.parity.checking.arguments import (
    narrowed_problems,
    port_problems,
    reference_problems,
    x64_problems,
)
from jax_attn.parity.checking.fixed import Problems, expect_none, fixed_problems
from jax_attn.parity.checking.judged import judged
from jax_attn.parity.checking.on_mesh import notes_on_mesh
from jax_attn.parity.checking.port_weights import HeldWeights
from jax_attn.parity.checking.probes import PortSide
from jax_attn.parity.checking.reference_side import TAPS, NotAskedError, ReferenceSide
from jax_attn.parity.checking.several_inputs import each_of, join_results, made_of_each
from jax_attn.parity.judge.result import Result
from jax_attn.parity.pair.pair import Given
from jax_attn.parity.run.ahead import compiled_ahead
from jax_attn.parity.run.inputs_and_runs import Arrays, Inputs, float_dtype
from jax_attn.parity.run.placement import MeshPlacement
from jax_attn.parity.run.port import Port
from jax_attn.transfer import Layout
from jax_attn.transfer.kinds.held import as_call, as_module

if TYPE_CHECKING:
    import torch

    from jax_attn.parity.explaining.explanation import Explanation
    from jax_attn.parity.run.reference import Reference


def check(
    reference: "torch.nn.Module | ReferenceSide",
    port: Any,
    inputs: Given | list[Given] | None = None,
    *,
    layout: Layout | None = None,
    reference_call: Callable[..., Any] | None = None,
    port_call: Callable[..., Any] | None = None,
    dtype: str | None = None,
    gradients: bool | None = None,
    transforms: Sequence[str] = ("eager", "jit"),
    seed: int | None = None,
    strict: bool = False,
    parameters: str | tuple[str, ...] | None = None,
    mesh: Mesh | None = None,
    specs: Mapping[str, PartitionSpec] | None = None,
) -> Result:
    """Check that `port` computes what `reference` computes, within what rounding allows.

    The oracle is the reference in float64, with every narrowing cast refused. The budget of a
    tensor is the spread of float64 runs of the reference in which every operation is perturbed by
    one roundoff of `dtype`. The reference itself is run in `dtype`, under grad and in inference
    mode, and judged by the same budget. If only the reference exceeds it, as under torch.autocast,
    the verdict is INCONCLUSIVE. It is also INCONCLUSIVE if these inputs would not reveal a planted
    bug; the reason names the bug and an input that reveals it.

    State that a call changes is compared too: running statistics that the table pairs, as in
    `row("bn.running_mean", "bn.mean")`, and the outputs of a second call that continues from them.
    A note names state that no row pairs, and parameters that no input reaches.

    Args:
      reference: the torch module, with its weights in place and in `dtype`. A copy is run. Or a
        `Golden`, a reference that `prepare` prepared, or `load_golden` read where there is no
        torch. Then `inputs`, `reference_call`, `dtype`, `gradients`, `seed` and `parameters` are
        those of the golden; leave them out.
      port: the NNX module, with its weights in place and in `dtype`; or a port of another kind: an
        Equinox module or (module, state), a Linen (module, variables), a built Keras model on the
        JAX backend, or `parity.function(apply, parameters)`. The check loads no weights, since that
        would hide a bad transfer.
      inputs: NumPy arrays that both sides receive, by position (a tuple) or by keyword (a dict).
        Floating-point arrays are rounded to `dtype`. A list of such inputs, for example of an odd
        and an even size, is checked one by one; the result holds all of them. It notes only those
        branches of the reference that act on none, and doubts only those bugs that none reveals.
      layout: the transfer table between the two modules. With it, the weights are compared first,
        bit for bit, and the gradients of the parameters are paired by it. Without it, a note says
        that neither was compared.
      reference_call: `(module, *args, **inputs) -> array | {name: array}`, if the reference is not
        called as `module(*args, **inputs)`. Use it to adapt masks, the order of axes, static
        arguments and several outputs. Two threads may call it at once, each with its own module.
      port_call: the same for the port. It receives the port as it was handed in, except that it
        receives a Linen module bound to its variables. An Equinox port with state returns
        (outputs, state).
      dtype: the dtype of both modules; float32 if it is left out. Outputs may be in a finer dtype,
        such as the float32 logits of a model in bfloat16, and a note says so if they are in only
        one of the two. A port with outputs in a coarser dtype is refused.
      gradients: whether to compare the gradients of the floating-point inputs and, with a layout,
        of the parameters, against one seeded cotangent for each output. They are unless this is
        False.
      transforms: how the port is run: any of eager, jit, grad, vmap and remat.
      seed: the seed of the cotangents; 0 if it is left out.
      strict: whether notes count as doubts, so that the verdict is INCONCLUSIVE if something was
        not compared that other arguments would compare. Standing notes, which no input could
        remove, stay notes: the shapes and transforms that were run, a pinned precision, a gradient
        that is zero in theory.
      parameters: a pattern of the reference's parameter names, such as "encoder.layer.0.*"
        (`fnmatch`), or a tuple of patterns. In a large model, only the gradients of these are
        compared and kept. None compares all. A note says how many of how many were compared.
      mesh: run the port on this mesh of devices, whose axes are all Explicit or all Auto. It is
        compared with the reference and with itself on one device, each within the budget. Copies of
        one array on several devices must be equal bit for bit. Notes say what the port sends
        between devices, what each device holds, and which gradients are sharded less than their
        parameters or inputs.
      specs: the sharding of the inputs and the port's parameters on the mesh: a mapping from the
        name of an input ("0" by position), or a pattern of dotted paths such as
        "layers.{i}.up.kernel", to a `PartitionSpec`. A Variable that no pattern matches keeps its
        sharding on the mesh; everything else is replicated on every device.

    Returns:
      The `Result`. Its `raise_for_status()` raises an error unless the verdict is PASS.

      If the perturbed runs take more than 20 s, stderr shows their progress. If the check needs
      more than half of the free memory, stderr says so.

    Raises:
      TypeError: arguments of the wrong type, each of them named.
      ValueError: arguments that cannot be checked, each of them named. `RaisedError`, a ValueError,
        reports an error that one side raises on its inputs; that error is its `__cause__`. If the
        port raises one under only some of `transforms`, this is a failure of the result, and the
        others are judged.
    """
    of_port = port_problems(port, layout, transforms, strict, port_call, (mesh, specs))
    prepares: list[Callable[..., ReferenceSide]] = []
    if isinstance(reference, ReferenceSide):
        golden, asked = reference, (inputs, dtype, gradients, seed, reference_call, parameters)
        of_jax = Problems([], x64_problems(golden.dtype))
        expect_none(fixed_problems(golden, *asked), of_jax, of_port)
        every = [golden.inputs]
        prepares.append(lambda **_: golden)
    else:
        dtype, seed = "float32" if dtype is None else dtype, 0 if seed is None else seed
        gradients = True if gradients is None else gradients
        of_reference = reference_problems(reference, dtype, gradients, seed, reference_call)
        of_jax = Problems([], x64_problems(dtype))
        expect_none(of_reference, of_jax, of_port)
        every = each_of(inputs, float_dtype(dtype))

        from jax_attn.parity.checking.preparing import prepare_module  # needs torch

        for given in every:
            others = tuple(other for other in every if other is not given)
            options = (reference_call, dtype, gradients, seed, parameters, others)
            prepares.append(partial(prepare_module, reference, given, *options))
    on_inputs = partial(port_on, port=port, call=port_call, mesh=mesh, specs=specs)
    is_several = isinstance(inputs, list)
    ports = made_of_each(every, on_inputs) if is_several else [on_inputs(every[0])]
    results: list[Result] = []
    hidden: frozenset[str] | None = None
    for prepare, placed in zip(prepares, ports, strict=True):
        # What some inputs reveal is revealed: later ones are asked about the rest alone.
        prepared = prepare(canaries=hidden)
        results.append(_checked(prepared, placed, tuple(transforms), layout))
        hidden = frozenset(prepared.hidden)
    result = join_results(results)
    return result.strict() if strict else result


def _checked(
    prepared: ReferenceSide,
    port: Port,
    transforms: tuple[str, ...],
    layout: Layout | None,
) -> Result:
    """Judge a port by a reference prepared on its inputs."""
    weights = None if layout is None else HeldWeights(port.module, layout)
    side = PortSide.of(prepared, port, transforms, weights)
    with compiled_ahead(port, prepared.dtype, prepared.differentiated, transforms):
        result = judged(prepared, side)
    on_mesh = notes_on_mesh(port, prepared.dtype, prepared.differentiated)
    result = replace(result, notes=(*on_mesh, *result.notes, *prepared.notes))
    reference, alone = prepared.at_hand, port.on_one_device() or port
    if reference is None:
        with suppress(NotAskedError):  # unless it was captured with its taps
            taps = prepared.answer(TAPS)
            explainer = partial(_explained_by, taps, prepared.inference, alone, layout)
            result = replace(result, explainer=explainer)
        return result
    reference.expect_unwritten()
    return replace(result, explainer=partial(_explained, reference, alone, layout))


def port_on(
    inputs: Inputs,
    port: Any,
    call: Callable[..., Any] | None,
    mesh: Mesh | None,
    specs: Mapping[str, PartitionSpec] | None,
) -> Port:
    """Return a port of any kind on its inputs, placed on the mesh, if there is one.

    Raises TypeError for integers that JAX narrows, and ValueError if the specs do not fit.
    """
    if problems := narrowed_problems(inputs):
        raise TypeError("\n".join(problems))
    module = as_module(port)
    placement = MeshPlacement.of(mesh, specs, module, inputs)
    return Port(module, as_call(port, call), inputs, placement=placement)


def explain(
    reference: "torch.nn.Module",
    port: Any,
    inputs: Given,
    **options: Any,
) -> "Explanation":
    """Find where `port` first computes another number than `reference`, and what would explain it.

    The port is checked. If it does not pass, every floating-point tensor that the reference
    computes in float64 is compared with every one that the port computes, equation by equation.
    Tensors are paired only by their numbers, not by names; axes may be permuted, merged or split. A
    wrong region lies between the last tensors that agree and the first that does not. Each region
    is verified: if the port receives the reference's numbers there, all that follows is right. Then
    the next region is searched for. The backward pass is searched if every output is right.

    Then the reference is run with common mistakes of ports in the region: another epsilon,
    activation, mask, scale, order of heads and so on. A cause is confirmed if the reference then
    computes the port's own numbers, within rounding.

    Args:
      reference, port, inputs: as for `check`.
      **options: the other arguments of `check`.

    Returns:
      The `Explanation`. It prints as a report; its `sentence` summarizes the finding.

    Raises:
      TypeError, ValueError: as `check` raises them. ValueError also if the reference runs different
        operations from run to run, or if its tensors do not fit into half of the free memory.
    """
    return check(reference, port, inputs, **options).explain()


def _explained(
    reference: "Reference", port: Port, layout: Layout | None, result: Result
) -> "Explanation":
    from jax_attn.parity.explaining.explain import explain_result  # needed only after a failure

    return explain_result(result, reference, port, layout)


def _explained_by(
    taps: Mapping[str, Any], outputs: Arrays, port: Port, layout: Layout | None, result: Result
) -> "Explanation":
    from jax_attn.parity.explaining.captured import explain_by_captured

    return explain_by_captured(result, taps, outputs, port, layout)
