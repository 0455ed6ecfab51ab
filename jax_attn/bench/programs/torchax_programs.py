"""The published torch code run by XLA through torchax: (workload, arrays) -> `Program`."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import torch
import torchax
from torchax import interop

from jax_attn.bench.programs import torch_programs
from jax_attn.bench.programs.program import Arrays, Program, from_design
from jax_attn.bench.workload import Workload
from jax_attn.transfer import LAYOUTS, as_numpy


def core(workload: Workload, arrays: Arrays) -> Program:
    future = None
    if workload.is_causal:
        future = interop.torch_view(jnp.array(as_numpy(torch_programs.future(workload))))
    call = partial(torch_programs.softmax, future=future)
    return Program(_on_xla(call), {}, kernel=torch_programs.EAGER)


def layer(workload: Workload, arrays: Arrays) -> Program:
    tensors = {name: torch_programs.tensor(a) for name, a in arrays.items()}
    module, given, design = torch_programs.published_layer(workload, tensors)
    weights = {name: as_numpy(p) for name, p in module.named_parameters()}
    masks = {name: interop.torch_view(jnp.array(as_numpy(mask))) for name, mask in given.items()}

    def call(x, *leaves):
        named = dict(zip(weights, leaves, strict=True))
        return torch.func.functional_call(module, named, (x,), masks)

    back = partial(from_design, workload, LAYOUTS[design])
    return Program(_on_xla(call), weights, back, kernel=design)


def _on_xla(function: Callable) -> Callable:
    """A torch function as one of JAX arrays."""
    seen = interop.jax_view(function)

    def call(*arrays):
        with torchax.default_env():
            return seen(*arrays)

    return call
