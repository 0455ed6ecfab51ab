"""What a translated module computes, judged by what float32 rounds."""

from typing import Any

from flax import nnx
from torch import nn

from jax_attn.parity import Verdict, check
from jax_attn.transfer import as_numpy
from jax_attn.translate.outputs import called


def assert_computes(port: nnx.Module, reference: nn.Module, *inputs: Any) -> None:
    """Assert that a port's outputs are its reference's, within the budget of a check."""
    result = check(
        reference,
        port,
        tuple(map(as_numpy, inputs)),
        reference_call=called,
        port_call=called,
        gradients=False,
        transforms=("jit",),
    )
    assert result.verdict is Verdict.PASS, result
