"""What rows that differ in their transform alone share: both sides drawn, the oracle solved."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import numpy as np
import torch
from flax import nnx

from jax_attn.attention import ArgumentError
from jax_attn.attention.dispatch import Kernel
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.checking.weights import compare_weights
from jax_attn.parity.judge.oracle import AttentionProblem, solve
from jax_attn.parity.matrix import cached_calls
from jax_attn.parity.matrix.cases import Case
from jax_attn.parity.matrix.designs import VOCABULARY, Design
from jax_attn.parity.matrix.kernels import recording
from jax_attn.parity.matrix.masks import MASKS
from jax_attn.parity.matrix.pair import Pair, Solve, insist
from jax_attn.parity.matrix.shapes import Size
from jax_attn.parity.run.inputs_and_runs import Inputs, Run
from jax_attn.parity.run.port import Port, float_dtype
from jax_attn.parity.run.reference import Reference

# Larger than torch's own, whose scores are so small that attention is nearly uniform: a
# wrong mask or scale would hardly show.
_GAIN, _BIAS = 1.2, 0.5


def draw_parameters(module: torch.nn.Module, seed: int) -> None:
    """Write parameters of which attention is not uniform, rounded to the module's dtype."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.ndim == 1:
                std = _BIAS
            else:
                std = 1.0 if "embedding" in name else _GAIN * p.shape[-1] ** -0.5
            p.copy_(torch.randn(p.shape, generator=generator) * std)


def draw_inputs(design: Design, mask: str, size: Size, seed: int) -> dict[str, np.ndarray]:
    """Everything that both sides are given, by name."""
    rng = np.random.default_rng(seed)
    if design.inputs == ("tokens",):
        return {"tokens": rng.integers(VOCABULARY, size=(size.B, size.T)).astype(np.int32)}
    widths = {"key": design.options.get("kdim", 0), "value": design.options.get("vdim", 0)}
    drawn = {
        name: rng.standard_normal(
            (size.B, size.S if name in widths else size.T, size.D + widths.get(name, 0))
        )
        for name in design.inputs
    }
    return drawn | MASKS[mask].inputs(rng, size)


@dataclass(frozen=True)
class Preparation:
    """What the rows of one `Case.preparation` share.

    precision: the budget's, where it is not the dtype's own. kernel: the port's, if it insists.
    """

    design: Design
    case: Case
    precision: str | None = None
    kernel: Kernel | None = None

    @cached_property
    def seed(self) -> int:
        """From the rows' names, so that it stays when rows are added."""
        return zlib.crc32("-".join(self.case.preparation).encode())

    @cached_property
    def inputs(self) -> dict[str, np.ndarray]:
        return draw_inputs(self.design, self.case.mask, self.case.size, self.seed)

    @cached_property
    def pair(self) -> Pair:
        """Both sides with the same parameters."""
        pair = Pair(self.design, self.case.size, self.case.dtype, self.kernel)
        draw_parameters(pair.reference, self.seed)
        pair.load_port()
        return pair

    @cached_property
    def reference(self) -> Reference:
        """The torch side with its call and its inputs."""
        call = self.design.reference_call(self.case.mask)
        return Reference(self.pair.reference, call, self._rounded_inputs)

    @cached_property
    def port(self) -> Port:
        """The Flax side with its call and its inputs."""
        return Port(self.pair.port, self.design.port_call(self.case.mask), self._rounded_inputs)

    @cached_property
    def _rounded_inputs(self) -> Inputs:
        return Inputs.of(self.inputs, float_dtype(self.case.dtype))

    @cached_property
    def refused(self) -> str | None:
        """Every reason why the kernel insisted on cannot serve the rows; None where it can."""
        return self._traced[0]

    @property
    def tiles(self) -> str:
        """Which tiles the attention of the port works in."""
        return self._traced[1]

    @property
    def pages(self) -> str:
        """Which pages the port's cache has, and of how many places; empty without a cache."""
        if not self.design.cached:
            return ""
        return cached_calls.pages_in_words(self.case.mask, self.case.size.T)

    @cached_property
    def _traced(self) -> tuple[str | None, str]:
        """(`refused`, `tiles`), of one trace of the port in which every kernel only says its tiles.

        What attends to a cache is no kernel that can be insisted on: it has its pages.
        """
        module = nnx.clone(self.pair.port)
        calls: list[str] = []
        if not self.design.cached:
            insist(module, recording(self.kernel, calls))
        forward, *args = replace(self.port, module=module).bind()
        try:
            jax.eval_shape(forward, *args)
        except ArgumentError as error:
            return " ".join(str(error).split()).removeprefix("ArgumentError: "), ""
        return None, "; ".join(dict.fromkeys(calls)) or "none: attention to a cache, by its pages"

    @cached_property
    def problem(self) -> AttentionProblem:
        return self.pair.problem(self.case.mask, self.inputs)

    def solution(self, cotangents: Mapping[str, np.ndarray], by: Solve = solve) -> Run:
        """The oracle's, or another's, under the reference's names."""
        return self.pair.solution(self.problem, self.inputs, cotangents, by)

    @cached_property
    def prepared(self) -> Prepared:
        """The reference's side of the comparison."""
        return Prepared(
            self.reference,
            self.case.dtype,
            seed=self.seed,
            oracle=self.solution,
            precision=self.precision,
            declared_nan=self.declared_nan,
        )

    @cached_property
    def declared_nan(self) -> dict[str, np.ndarray]:
        """Where the design as published gives NaN: in every row that may attend to nothing."""
        if not self.design.nan_rows or self.problem.allowed is None:
            return {}
        size = self.case.size
        full = (size.B, size.N, size.T, size.S)
        empty_BNT = ~np.any(np.broadcast_to(self.problem.allowed, full), axis=-1)
        if not empty_BNT.any():
            return {}
        where = {
            "output": np.broadcast_to(
                np.any(empty_BNT, axis=1)[..., None], (size.B, size.T, size.D)
            )
        }
        if "weights" in self.reference.outputs(self.case.dtype):
            where["weights"] = np.broadcast_to(empty_BNT[..., None], full)
        return where

    @cached_property
    def weight_failures(self) -> tuple[str, ...]:
        return compare_weights(self.pair.reference, self.pair.port, self.design.layout).differences
