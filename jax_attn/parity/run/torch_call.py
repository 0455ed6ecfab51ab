"""One call of a torch module: its outputs, gradients and state, as NumPy arrays."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import _engine_run_backward

from jax_attn.parity.run.call_side import call_side
from jax_attn.parity.run.inputs_and_runs import (
    Arrays,
    Inputs,
    RaisedError,
    Run,
    changed,
    named_outputs,
)
from jax_attn.parity.run.modes.constants import mark
from jax_attn.parity.run.modes.many_runs import each_run, lifted
from jax_attn.transfer import as_numpy

Tensors = dict[str, torch.Tensor]
_WRITES_TO_A_LEAF = "a leaf Variable that requires grad is being used in an in-place operation"
"""What torch says of a ReLU(inplace=True) in front; it runs on inputs that need no gradient."""


@dataclass(frozen=True)
class TorchCall:
    """How a module is called: by `call`, if there is one, on these inputs.

    parameters: the names of those that are differentiated; None means all.
    """

    call: Callable[..., Any] | None
    inputs: Inputs
    parameters: Collection[str] | None = None

    def tensors(self, dtype: torch.dtype, *, requires_grad: bool) -> tuple[tuple, Tensors]:
        """Return the inputs as tensors, the floating ones in `dtype`."""

        def tensor(a: np.ndarray) -> torch.Tensor:
            if a.dtype.kind in "biu":
                return torch.from_numpy(a.copy())
            # Through float64, which holds every narrower value: NumPy has no bfloat16.
            x = torch.from_numpy(a.astype(np.float64)).to(dtype)
            mark(x, None)  # else an active mode would take it for a constant of the module
            return x.requires_grad_(requires_grad)

        inputs = self.inputs
        return tuple(map(tensor, inputs.args)), {k: tensor(a) for k, a in inputs.kwargs.items()}

    def outputs(self, module: torch.nn.Module, args: tuple, kwargs: Tensors) -> Tensors:
        """Return the outputs of a module by name."""
        call = partial(self.call, module) if self.call else module
        result = call_side("reference", self.inputs, call, *args, **kwargs)
        return named_outputs(result, torch.Tensor, "reference")

    def _differentiable_outputs(
        self, module: torch.nn.Module, args: tuple, kwargs: Tensors
    ) -> Tensors:
        """Return the outputs; of copies of the inputs, if the module writes to what it is given."""
        try:
            return self.outputs(module, args, kwargs)
        except RaisedError as error:
            if _WRITES_TO_A_LEAF not in str(error.__cause__):
                raise
        copies = {name: x.clone() for name, x in kwargs.items()}
        return self.outputs(module, tuple(x.clone() for x in args), copies)

    def run(
        self,
        module: torch.nn.Module,
        dtype: torch.dtype,
        cotangents: Arrays,
        *,
        again: bool,
        runs: int | None = None,
    ) -> Run:
        """Return outputs, gradients and, if its buffers change, the state of a copy of the module.

        again: call a module that changed its buffers a second time. runs: the number of runs in a
        pass, whose arrays have them as first axis.
        """
        for name, parameter in module.named_parameters():
            # Differentiate frozen parameters too: freezing concerns only the optimizer.
            wanted = self.parameters is None or name in self.parameters
            is_number = parameter.is_floating_point() or parameter.is_complex()
            parameter.requires_grad_(wanted and is_number)
        args, kwargs = self.tensors(dtype, requires_grad=True)
        before = buffers(module, runs)
        outputs = self._differentiable_outputs(module, args, kwargs)
        after = buffers(module, runs)
        inputs = self.inputs.named(args, kwargs)
        grads = (arrays(g, runs) for g in _gradients(module, inputs, outputs, cotangents))
        of_inputs, of_parameters = grads
        if not changed(before, after):
            return Run(arrays(outputs, runs), of_inputs, of_parameters)
        # A second call may write to outputs of the first, and to what gradients need.
        first = {name: array.copy() for name, array in arrays(outputs, runs).items()}
        second = arrays(self.outputs(module, args, kwargs), runs) if again else {}
        return Run(first, of_inputs, of_parameters, after, second)


def _gradients(
    module: torch.nn.Module, inputs: Tensors, outputs: Tensors, cotangents: Arrays
) -> tuple[Tensors, Tensors]:
    """Return the gradients of inputs and of parameters, by name; none without cotangents."""
    if not cotangents:
        return {}, {}
    leaves = {("input", k): x for k, x in inputs.items() if x.requires_grad}
    leaves |= {("parameter", k): p for k, p in module.named_parameters() if p.requires_grad}
    active = [k for k, y in outputs.items() if y.requires_grad]
    grads: Sequence[torch.Tensor | None] = [None] * len(leaves)
    if active and leaves:
        # As torch.autograd.grad, whose check of the cotangents' shapes imports sympy: a second.
        grads = _engine_run_backward(
            tuple(outputs[k] for k in active),
            tuple(
                torch.from_numpy(cotangents[k].astype(np.float64)).to(outputs[k]) for k in active
            ),
            False,  # keep the graph
            False,  # create a graph
            tuple(leaves.values()),
            True,  # allow leaves that the outputs do not depend on
            accumulate_grad=False,
        )
    by_kind: dict[str, Tensors] = {"input": {}, "parameter": {}}
    for ((kind, name), leaf), grad in zip(leaves.items(), grads, strict=True):
        by_kind[kind][name] = torch.zeros_like(leaf) if grad is None else grad.contiguous()
    return by_kind["input"], by_kind["parameter"]


def buffers(module: torch.nn.Module, runs: int | None = None) -> dict[str, np.ndarray]:
    """Return copies of every non-boolean buffer, by name; runs: as for `TorchCall.run`."""
    held = {name: x for name, x in module.named_buffers() if x.dtype is not torch.bool}
    return {name: array.copy() for name, array in arrays(held, runs).items()}


def lift_buffers(module: torch.nn.Module, runs: int) -> None:
    """Give each run of a pass buffers of its own."""
    for part in module.modules():
        for name, x in part._buffers.items():
            if x is not None and x.is_floating_point():
                setattr(part, name, lifted(x, runs))


def arrays(tensors: Mapping[str, torch.Tensor], runs: int | None = None) -> dict[str, np.ndarray]:
    """Return tensors as arrays; runs: as for `TorchCall.run`."""
    return {name: as_numpy(x if runs is None else each_run(x, runs)) for name, x in tensors.items()}
