"""A row of the built-in matrix: both sides drawn, the oracle solved."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jax_attn.attention import ArgumentError
from jax_attn.attention.dispatch import Kernel
from jax_attn.nn import GroupedQueryAttention
from jax_attn.parity.checking.check import Prepared, compare_weights
from jax_attn.parity.judge.oracle import AttentionProblem, Solution, solve
from jax_attn.parity.matrix.cases import Case
from jax_attn.parity.matrix.designs import VOCABULARY, Design
from jax_attn.parity.matrix.masks import DROPPED, MASKS
from jax_attn.parity.matrix.shapes import Size
from jax_attn.parity.run.inputs_and_runs import Inputs, Run
from jax_attn.parity.run.port import Port, float_dtype
from jax_attn.parity.run.reference import Reference
from jax_attn.transfer import load

Arrays = Mapping[str, np.ndarray]
MASK_INPUTS = ("lengths", "allowed", "zero_one", "bias", "keep")


# Larger than torch's own, whose scores are so small that attention is nearly uniform: a
# wrong mask or scale would hardly show.
_GAIN, _BIAS = 1.2, 0.5


def draw_reference(design: Design, size: Size, dtype: str, seed: int) -> torch.nn.Module:
    """The torch module in eval mode, its parameters drawn so that attention is not uniform."""
    module = design.reference(size).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            std = (
                _BIAS
                if p.ndim == 1
                else 1.0
                if "embedding" in name
                else _GAIN * p.shape[-1] ** -0.5
            )
            p.copy_(torch.randn(p.shape, generator=generator) * std)
    return module.to(getattr(torch, dtype))


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


def problem(
    design: Design, mask: str, size: Size, inputs: Arrays, state: Arrays
) -> AttentionProblem:
    """The design's meaning, from torch's own state dict; all arrays in float64."""
    masks = {k: inputs[k] for k in MASK_INPUTS if k in inputs}
    if design.inputs == ("tokens",):
        given = {"tokens": state["embedding.weight"][inputs["tokens"]]}
    else:
        given = {name: inputs[name] for name in design.inputs}
    reads = design.inputs * (3 // len(design.inputs))
    return AttentionProblem(
        inputs=given,
        weights={
            name: state[key] if isinstance(key, str) else np.split(state[key[0]], 3)[key[1]]
            for name, key in design.weights.items()
            if (key if isinstance(key, str) else key[0]) in state
        },
        num_heads=size.N,
        num_kv_heads=design.key_heads(size),
        reads=dict(zip("qkv", reads, strict=True)),
        scale=design.options.get("scale"),
        softcap=design.options.get("softcap"),
        after=design.options.get("after", ()),
        allowed=MASKS[mask].allowed(masks, size),
        bias=masks.get("bias"),
        kept=masks["keep"] / (1 - DROPPED) if "keep" in masks else None,
    )


def named(design: Design, solution: Solution, inputs: Arrays, outputs: tuple[str, ...]) -> Run:
    """The oracle's solution under the reference's names, its gradients in torch's layout."""
    found = {"output": solution.output, "weights": solution.weights}
    if design.heads_average:
        found["weights"] = solution.weights.mean(axis=1)
    input_grads = dict(solution.input_grads)
    if solution.bias_grad is not None:
        input_grads["bias"] = solution.bias_grad
    params: dict[str, np.ndarray] = {}
    thirds: dict[str, dict[int, np.ndarray]] = {}
    for name, grad in solution.weight_grads.items():
        key = design.weights[name]
        if isinstance(key, str):
            params[key] = grad
        else:
            thirds.setdefault(key[0], {})[key[1]] = grad
    params |= {key: np.concatenate([g[i] for i in range(3)]) for key, g in thirds.items()}
    if design.inputs == ("tokens",):
        table = np.zeros((VOCABULARY, solution.output.shape[-1]))
        np.add.at(table, inputs["tokens"], input_grads.pop("tokens"))
        params["embedding.weight"] = table
    return Run({k: found[k] for k in outputs}, input_grads, params)


def weights_cotangent(design: Design, cotangent: np.ndarray | None, heads: int):
    """What the weights' cotangent is for each head: its share, where the heads are averaged."""
    if cotangent is None or not design.heads_average:
        return cotangent
    return np.repeat(cotangent[:, None] / heads, heads, axis=1)


def float_inputs(inputs: Arrays, dtype: str) -> dict[str, np.ndarray]:
    """`inputs` as both sides see them, rounded to `dtype`, as float64."""
    return {
        k: a if a.dtype.kind in "biu" else a.astype(jnp.dtype(dtype)).astype(np.float64)
        for k, a in inputs.items()
    }


@dataclass(frozen=True)
class Row:
    """What the rows of one `Case.preparation` share: both sides built, the oracle solved."""

    design: Design
    case: Case
    precision: str | None = None
    kernel: Kernel | None = None

    @cached_property
    def seed(self) -> int:
        """From the row's name, so that it stays when rows are added."""
        return zlib.crc32("-".join(self.case.preparation).encode())

    @cached_property
    def inputs(self) -> dict[str, np.ndarray]:
        return draw_inputs(self.design, self.case.mask, self.case.size, self.seed)

    @cached_property
    def reference(self) -> torch.nn.Module:
        return draw_reference(self.design, self.case.size, self.case.dtype, self.seed)

    @cached_property
    def given(self) -> Inputs:
        return Inputs.of(self.inputs, float_dtype(self.case.dtype))

    @cached_property
    def port(self) -> nnx.Module:
        """The Flax module with the reference's weights, through the transfer table."""
        module = self.design.port(self.case.size, self.case.dtype, nnx.Rngs(0))
        module.eval()
        for _, inner in nnx.iter_modules(module):
            if isinstance(inner, GroupedQueryAttention):
                inner.implementation = self.kernel
        load(module, self.reference.state_dict(), self.design.layout)
        return module

    @cached_property
    def bound(self) -> Port:
        """The port with its call and its inputs."""
        return Port(self.port, self.design.port_call(self.case.mask), self.given)

    @cached_property
    def refused(self) -> str | None:
        """Every reason why the kernel insisted on cannot serve the row; None where it can."""
        forward, *args = self.bound.bind()
        try:
            jax.eval_shape(forward, *args)
        except ArgumentError as error:
            return " ".join(str(error).split()).removeprefix("ArgumentError: ")
        return None

    @cached_property
    def problem(self) -> AttentionProblem:
        state = {k: v.double().numpy() for k, v in self.reference.state_dict().items()}
        inputs = float_inputs(self.inputs, self.case.dtype)
        return problem(self.design, self.case.mask, self.case.size, inputs, state)

    def solution(self, cotangents: Arrays, solved_by: Callable[..., Solution] = solve) -> Run:
        """The oracle's, or another's, under the reference's names."""
        weights = weights_cotangent(self.design, cotangents.get("weights"), self.problem.num_heads)
        solved = solved_by(self.problem, cotangents["output"], weights)
        return named(self.design, solved, self.inputs, tuple(cotangents))

    @cached_property
    def prepared(self) -> Prepared:
        return Prepared(
            Reference(self.reference, self.design.reference_call(self.case.mask), self.given),
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
        empty_BNT = ~np.broadcast_to(self.problem.allowed, full).any(axis=-1)
        if not empty_BNT.any():
            return {}
        where = {
            "output": np.broadcast_to(empty_BNT.any(axis=1)[..., None], (size.B, size.T, size.D))
        }
        if "weights" in self.outputs:
            where["weights"] = np.broadcast_to(empty_BNT[..., None], full)
        return where

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        call = self.design.reference_call(self.case.mask)
        return tuple(Reference(self.reference, call, self.given).outputs(self.case.dtype))

    @cached_property
    def weight_failures(self) -> tuple[str, ...]:
        return compare_weights(self.reference, self.port, self.design.layout)
