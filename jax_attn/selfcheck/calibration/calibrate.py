"""Judge correct configurations, and measure how much of its budget each one uses.

A configuration is judged as `check` judges a pair, by `checking.prepared.Prepared`: against the
float64 oracle, within the spread of the perturbed runs, by every gate. A FAIL is a false alarm.
Some of the configurations also get planted bugs, which shows what the same budgets let pass.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import torch

from jax_attn.attention.dispatch import KERNELS, Kernel
from jax_attn.attention.kernels.tile import Tiles
from jax_attn.parity.bugs import softmax
from jax_attn.parity.checking.judging import judge_port
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.checking.weights import Weights, compare_weights
from jax_attn.parity.run.emulate import emulate
from jax_attn.parity.run.inputs_and_runs import Inputs, Run, float_dtype
from jax_attn.parity.run.port import Port, x64_for
from jax_attn.parity.run.reference import Reference
from jax_attn.parity.run.transforms import forward_and_gradients
from jax_attn.selfcheck.calibration.blocks import BLOCKS
from jax_attn.selfcheck.calibration.configurations import Configuration, PortProgram
from jax_attn.selfcheck.calibration.draw import Drawn, draw
from jax_attn.selfcheck.calibration.report import PortTrial
from jax_attn.selfcheck.matrix import calls
from jax_attn.selfcheck.matrix.designs import PORTED_DESIGNS, Design
from jax_attn.selfcheck.matrix.kernels import tiled
from jax_attn.selfcheck.matrix.preparation import DesignPair
from jax_attn.transfer import flatten

Arrays = Mapping[str, np.ndarray]
Step = Callable[..., Any]


# --- both sides of a program ----------------------------------------------------------------------


def _reference_call(kind: str) -> Step:
    def call(
        module: Any, query: Any, key: Any, value: Any, bias: Any = None, **masks: torch.Tensor
    ) -> torch.Tensor:
        sizes = query.shape[1], key.shape[1]
        arrays = kind == "arrays"
        allowed = masks["allowed"] if arrays else calls.torch_allowed(kind, masks, *sizes)
        return module(query, key, value, allowed, bias=bias)

    return call


def _port_call(kind: str) -> Step:
    def call(
        module: Any, query: Any, key: Any, value: Any, bias: Any = None, **masks: jax.Array
    ) -> jax.Array:
        keywords = {"mask": masks["allowed"]} if kind == "arrays" else calls.jax_mask(kind, masks)
        return module(query, key, value, bias=bias, **keywords)

    return call


def design_of(program: PortProgram) -> Design:
    """Return the block, or the published design, called with the program's kind of mask."""
    if program.is_block:
        return BLOCKS[program.design]
    return replace(
        PORTED_DESIGNS[program.design], reference_call=_reference_call, port_call=_port_call
    )


def kernel_of(program: PortProgram) -> Kernel:
    """Return the kernel that the program's port insists on: blocked, in its tiles, or dense."""
    if program.tile is None:
        return KERNELS["dense"]
    T, S = program.tile
    return tiled(KERNELS["blocked"], Tiles(K=1, T=T, S=S))


@dataclass(frozen=True)
class _Compiled(Port):
    """A port that runs a forward and backward pass that is already compiled, on new data."""

    step: Step

    def run(self, dtype: str, cotangents: Arrays, transform: str) -> Run:
        _, *args = self.bind()
        on_device = {k: jax.numpy.array(a, dtype) for k, a in cotangents.items()}
        (outputs, _), (params, inputs) = jax.device_get(self.step(*args, on_device))
        return Run(outputs, inputs, flatten(params))


def pair_of(program: PortProgram) -> DesignPair:
    """Build both sides of a program once; weights are written into them later."""
    return DesignPair(design_of(program), program.size, program.dtype, kernel_of(program))


def step_of(program: PortProgram, port: Port) -> Step:
    """Return the port's forward and backward pass, which is compiled at its first call."""
    forward, *_ = port.bind()

    def step(*args: Any) -> Any:
        return forward_and_gradients(forward, *args)

    return emulate(step, program.unit) if program.unit else jax.jit(step)


# --- one configuration ----------------------------------------------------------------------------


def judged(configurations: Sequence[Configuration]) -> list[PortTrial]:
    """Judge each configuration; all of them belong to one program."""
    program = configurations[0].program
    pair, step, trials = pair_of(program), None, []
    with x64_for(program.dtype), jax.default_device(jax.devices("cpu")[0]):
        for configuration in configurations:
            begun = time.perf_counter()
            drawn = draw(configuration)
            write(pair.reference, drawn)
            pair.load_port()
            inputs = Inputs.of(drawn.inputs, float_dtype(program.dtype))
            port = Port(pair.port, pair.design.port_call(program.call), inputs)
            step = step or step_of(program, port)
            prepared = prepare(program, pair, drawn, inputs)
            weights = compare_weights(Weights.of(pair.reference), pair.port, pair.design.layout)
            judged_by = partial(
                judge_port,
                port=_Compiled(port.module, port.call, port.inputs, step),
                transforms=("emulated" if program.unit else "jit",),
                to_torch=pair.design.layout.to_torch,
                failures=weights.differences,
                name=configuration.name,
            )
            result = prepared.judged_again(judged_by(prepared), judged_by)
            trials.append(
                PortTrial.of(
                    configuration,
                    drawn.traits,
                    result,
                    seconds=time.perf_counter() - begun,
                    planted=dict(planted(prepared)) if configuration.plants else {},
                )
            )
    return trials


def write(module: torch.nn.Module, drawn: Drawn) -> None:
    """Write the drawn parameters, rounded to the module's dtype."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(torch.from_numpy(drawn.parameter(name, tuple(p.shape))))


def prepare(program: PortProgram, pair: DesignPair, drawn: Drawn, inputs: Inputs) -> Prepared:
    """Return the reference's side: attention has the oracle, a block its own module in float64."""
    oracle = None
    if not program.is_block:
        # The mask is an array, as for the matrix's per-head masks.
        mask = "per_head" if program.call == "arrays" else program.call
        oracle = partial(pair.solution, pair.problem(mask, drawn.inputs), drawn.inputs)
    call = pair.design.reference_call(program.call)
    return Prepared(
        Reference(pair.reference, call, inputs),
        program.dtype,
        seed=drawn.seed,
        oracle=oracle,
        precision=program.unit,
    )


# --- power ----------------------------------------------------------------------------------------


PLANTED = (softmax.SCALE, softmax.UNMASKED, softmax.NARROW, softmax.STOPPED)


def planted(prepared: Prepared) -> Iterator[tuple[str, bool]]:
    """Yield each bug that can be planted, and whether the comparison fails it.

    A wrong softmax is looked for only in the outputs, a stopped gradient also in the gradients.
    """
    for bug in PLANTED:
        mode = bug.planted()
        run = prepared.reference.under(mode, prepared.cotangents if bug.is_backward else {})
        if mode.planted:
            yield bug.name, prepared.would_fail(run)
