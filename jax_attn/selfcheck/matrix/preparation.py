"""The parts shared by rows that differ only in their transform: both sides and the oracle."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jax_attn.attention import ArgumentError
from jax_attn.attention.dispatch import Implementation, Kernel
from jax_attn.nn import GroupedQueryAttention
from jax_attn.parity.checking.prepared import Prepared
from jax_attn.parity.checking.weights import Weights, compare_weights
from jax_attn.parity.judge.finding import Finding
from jax_attn.parity.run.inputs_and_runs import Inputs, Run, float_dtype
from jax_attn.parity.run.port import Port
from jax_attn.parity.run.reference import Reference
from jax_attn.selfcheck.matrix import cached_calls
from jax_attn.selfcheck.matrix.cases import Case, Size
from jax_attn.selfcheck.matrix.designs import VOCABULARY, Design
from jax_attn.selfcheck.matrix.kernels import DENSE, is_dense, recording
from jax_attn.selfcheck.matrix.masks import DROPPED, MASKS
from jax_attn.selfcheck.oracle import AttentionProblem, Solution, solve
from jax_attn.transfer import load

Arrays = Mapping[str, np.ndarray]
Solve = Callable[..., Solution]


@dataclass(frozen=True)
class DesignPair:
    """Both sides of a design, each built once, in eval mode; the caller writes the parameters.

    kernel: the one that the port's attention insists on; None lets it choose.
    """

    design: Design
    size: Size
    dtype: str
    kernel: Implementation = None

    @cached_property
    def reference(self) -> torch.nn.Module:
        return self.design.reference(self.size).eval().to(getattr(torch, self.dtype))

    @cached_property
    def port(self) -> nnx.Module:
        module = self.design.port(self.size, self.dtype, nnx.Rngs(0))
        module.eval()
        insist(module, self.kernel)
        return module

    def load_port(self) -> None:
        """Write the reference's parameters into the port, through the transfer table."""
        load(self.port, self.reference.state_dict(), self.design.layout)

    def problem(self, mask: str, inputs: Arrays) -> AttentionProblem:
        """Return the oracle's problem for these inputs, from torch's own state dict, in float64."""
        design, size = self.design, self.size
        inputs = as_seen(inputs, self.dtype)
        state = {k: v.double().numpy() for k, v in self.reference.state_dict().items()}
        masks = {k: a for k, a in inputs.items() if k not in design.inputs}
        if design.inputs == ("tokens",):
            read = {"tokens": state["embedding.weight"][inputs["tokens"]]}
        else:
            read = {name: inputs[name] for name in design.inputs}
        reads = design.inputs * (3 // len(design.inputs))
        return AttentionProblem(
            inputs=read,
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
            add_zero_attn=design.options.get("add_zero_attn", False),
        )

    def solution(
        self, problem: AttentionProblem, inputs: Arrays, cotangents: Arrays, by: Solve = solve
    ) -> Run:
        """Return the solution of the oracle, or of `by`, under the reference's names and layout."""
        d_weights = cotangents.get("weights")
        if d_weights is not None and self.design.heads_average:  # each head gets its share
            heads = problem.num_heads
            d_weights = np.repeat(d_weights[:, None] / heads, heads, axis=1)
        solution = by(problem, cotangents["output"], d_weights)
        averaged = self.design.heads_average
        weights = solution.weights.mean(axis=1) if averaged else solution.weights
        outputs = {"output": solution.output, "weights": weights}
        input_grads = dict(solution.input_grads)
        if solution.bias_grad is not None:
            input_grads["bias"] = solution.bias_grad
        parameter_grads = self._in_torch_layout(solution.weight_grads)
        if "tokens" in input_grads:
            table = np.zeros((VOCABULARY, solution.output.shape[-1]))
            np.add.at(table, inputs["tokens"], input_grads.pop("tokens"))
            parameter_grads["embedding.weight"] = table
        return Run({k: outputs[k] for k in cotangents}, input_grads, parameter_grads)

    def _in_torch_layout(self, weight_grads: Arrays) -> dict[str, np.ndarray]:
        """Return gradients by torch's keys, packed if torch packs three weights into one."""
        grads: dict[str, np.ndarray] = {}
        thirds: dict[str, dict[int, np.ndarray]] = {}
        for name, grad in weight_grads.items():
            key = self.design.weights[name]
            if isinstance(key, str):
                grads[key] = grad
            else:
                thirds.setdefault(key[0], {})[key[1]] = grad
        return grads | {key: np.concatenate([g[i] for i in range(3)]) for key, g in thirds.items()}


def insist(module: nnx.Module, kernel: Implementation) -> None:
    """Make every attention module inside `module` insist on the kernel."""
    for _, inner in nnx.iter_modules(module):
        if isinstance(inner, GroupedQueryAttention):
            inner.implementation = kernel


def as_seen(inputs: Arrays, dtype: str) -> dict[str, np.ndarray]:
    """Return `inputs` as both sides see them: rounded to `dtype`, as float64."""
    return {
        k: a if a.dtype.kind in "biu" else a.astype(jnp.dtype(dtype)).astype(np.float64)
        for k, a in inputs.items()
    }


# Larger than torch's own, with which scores are so small that attention is nearly uniform, and a
# wrong mask or scale would hardly show.
_GAIN, _BIAS = 1.2, 0.5


def draw_parameters(module: torch.nn.Module, seed: int) -> None:
    """Write parameters with which attention is not uniform, rounded to the module's dtype."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.ndim == 1:
                std = _BIAS
            else:
                is_row = "embedding" in name or name in ("bias_k", "bias_v")
                std = 1.0 if is_row else _GAIN * p.shape[-1] ** -0.5
            p.copy_(torch.randn(p.shape, generator=generator) * std)


def draw_inputs(design: Design, mask: str, size: Size, seed: int) -> dict[str, np.ndarray]:
    """Draw all inputs of both sides, by name."""
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
    if mask == "dropout":  # the draw covers all columns of the weights
        size = replace(size, S=size.S + design.extra_columns)
    return drawn | MASKS[mask].inputs(rng, size)


@dataclass(frozen=True)
class Preparation:
    """The parts shared by the rows of one `Case.preparation`.

    precision: that of the budget, if it is not the dtype's own. kernel: the one that the port
    insists on, if any.
    """

    design: Design
    case: Case
    precision: str | None = None
    kernel: Kernel | None = None

    @cached_property
    def seed(self) -> int:
        """A seed from the rows' names, so that it does not change when rows are added."""
        return zlib.crc32("-".join(self.case.preparation).encode())

    @cached_property
    def inputs(self) -> dict[str, np.ndarray]:
        return draw_inputs(self.design, self.case.mask, self.case.size, self.seed)

    @cached_property
    def pair(self) -> DesignPair:
        """Both sides with the same parameters."""
        pair = DesignPair(self.design, self.case.size, self.case.dtype, self.kernel)
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

    def refused(self, transform: str) -> str | None:
        """Return every reason why the kernel cannot serve a row of a transform; None if it can."""
        return None if self.kernel is None else self.traced(transform)[0]

    def tiles(self, transform: str) -> str:
        """Return the tiles that the port's attention uses under a transform."""
        dense = not self.design.cached and is_dense(self.kernel, self.case.size)
        return DENSE if dense else self.traced(transform)[1]

    @property
    def pages(self) -> str:
        """The pages of the port's cache, and their numbers of places; empty without a cache."""
        if not self.design.cached:
            return ""
        return cached_calls.pages_in_words(self.case.mask, self.case.size.T)

    def traced(self, transform: str) -> tuple[str | None, str]:
        """Return (`refused`, `tiles`), from a trace in which kernels only note their tiles.

        A port cannot insist on a kernel for attention to a cache, which works by pages.
        """
        is_mapped = transform == "vmap"  # no other transform changes which kernels serve a call
        if is_mapped not in self._traces:
            self._traces[is_mapped] = self._trace(is_mapped)
        return self._traces[is_mapped]

    @cached_property
    def _traces(self) -> dict[bool, tuple[str | None, str]]:
        return {}

    def _trace(self, is_mapped: bool) -> tuple[str | None, str]:
        by_pages = "none: attention to a cache, by its pages"
        if self.design.cached and self.kernel is None:
            return None, by_pages
        module = nnx.clone(self.pair.port)
        calls: list[str] = []
        if not self.design.cached:
            insist(module, recording(self.kernel, calls))
        forward, *args = replace(self.port, module=module).bind()
        if is_mapped:
            params, *given = args
            lanes = jax.tree.map(lambda a: jax.ShapeDtypeStruct((2, *a.shape), a.dtype), given)
            forward, args = jax.vmap(forward, in_axes=(None, 0, 0)), [params, *lanes]
        try:
            jax.eval_shape(forward, *args)
        except ArgumentError as error:
            return " ".join(str(error).split()).removeprefix("ArgumentError: "), ""
        return None, "; ".join(dict.fromkeys(calls)) or by_pages

    @cached_property
    def problem(self) -> AttentionProblem:
        return self.pair.problem(self.case.mask, self.inputs)

    def solution(self, cotangents: Mapping[str, np.ndarray], by: Solve = solve) -> Run:
        """Return the solution of the oracle, or of `by`, under the reference's names."""
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
        """The places where the published design gives NaN: every row that may attend to nothing."""
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
    def weight_failures(self) -> tuple[Finding, ...]:
        weights = Weights.of(self.pair.reference)
        return compare_weights(weights, self.pair.port, self.design.layout).differences
