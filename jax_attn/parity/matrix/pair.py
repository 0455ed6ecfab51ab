"""A design's two sides at one size, and what they mean to the float64 oracle."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jax_attn.attention.dispatch import Implementation
from jax_attn.nn import GroupedQueryAttention
from jax_attn.parity.judge.oracle import AttentionProblem, Solution, solve
from jax_attn.parity.matrix.designs import VOCABULARY, Design
from jax_attn.parity.matrix.masks import DROPPED, MASKS
from jax_attn.parity.matrix.shapes import Size
from jax_attn.parity.run.inputs_and_runs import Run
from jax_attn.transfer import load

Arrays = Mapping[str, np.ndarray]
Solve = Callable[..., Solution]


@dataclass(frozen=True)
class Pair:
    """Both sides, each built once, in eval mode; whoever uses them writes the parameters.

    kernel: what the port's attention insists on; None lets it choose.
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
        """What the pair computes of these inputs, from torch's own state dict; in float64."""
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
        )

    def solution(
        self, problem: AttentionProblem, inputs: Arrays, cotangents: Arrays, by: Solve = solve
    ) -> Run:
        """The oracle's solution, or another's, under the reference's names and in its layout."""
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
        if self.design.inputs == ("tokens",):
            table = np.zeros((VOCABULARY, solution.output.shape[-1]))
            np.add.at(table, inputs["tokens"], input_grads.pop("tokens"))
            parameter_grads["embedding.weight"] = table
        return Run({k: outputs[k] for k in cotangents}, input_grads, parameter_grads)

    def _in_torch_layout(self, weight_grads: Arrays) -> dict[str, np.ndarray]:
        """Gradients by torch's keys, packed where torch packs three into one."""
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
    """Let every attention module inside `module` insist on the kernel."""
    for _, inner in nnx.iter_modules(module):
        if isinstance(inner, GroupedQueryAttention):
            inner.implementation = kernel


def as_seen(inputs: Arrays, dtype: str) -> dict[str, np.ndarray]:
    """`inputs` as both sides see them, rounded to `dtype`, as float64."""
    return {
        k: a if a.dtype.kind in "biu" else a.astype(jnp.dtype(dtype)).astype(np.float64)
        for k, a in inputs.items()
    }
