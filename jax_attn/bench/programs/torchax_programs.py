"""Published torch code, run by XLA through torchax: (workload, arrays) -> `TimedProgram`."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import torch
import torchax
from torchax import interop

from jax_attn.bench.programs import torch_programs
from jax_attn.bench.programs.program import Arrays, TimedProgram, from_design
from jax_attn.bench.workload import Workload
from jax_attn.transfer import LAYOUTS, as_numpy
from jax_attn.transfer.arrays import as_torch


def core(workload: Workload, arrays: Arrays) -> TimedProgram:
    future = None
    if workload.is_causal:
        future = interop.torch_view(jnp.array(as_numpy(~torch_programs.visible(workload))))
    call = partial(torch_programs.softmax, future=future)
    return TimedProgram(_on_xla(call), {}, kernel=torch_programs.EAGER)


def layer(workload: Workload, arrays: Arrays) -> TimedProgram:
    tensors = {name: as_torch(a.copy()) for name, a in arrays.items()}
    module, visible, design = torch_programs.published_layer(workload, tensors)
    weights = {name: as_numpy(p) for name, p in module.named_parameters()}
    masks = {name: interop.torch_view(jnp.array(as_numpy(mask))) for name, mask in visible.items()}

    def call(x: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        named = dict(zip(weights, leaves, strict=True))
        return torch.func.functional_call(module, named, (x,), masks)

    back = partial(from_design, workload, LAYOUTS[design])
    return TimedProgram(_on_xla(call), weights, back, kernel=design)


def _on_xla(function: Callable[..., torch.Tensor]) -> Callable[..., jax.Array]:
    """Convert a torch function to a function of JAX arrays."""
    on_arrays = interop.jax_view(function)

    def call(*arrays: jax.Array) -> jax.Array:
        with torchax.default_env():
            return on_arrays(*arrays)

    return call
