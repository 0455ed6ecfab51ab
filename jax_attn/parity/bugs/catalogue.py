"""The table of bugs that are tried for each operator."""

from collections.abc import Callable, Iterator

from torch import Tensor

from jax_attn.parity.bugs.activations import activations, derivatives
from jax_attn.parity.bugs.bug import Bug, OperatorCall
from jax_attn.parity.bugs.convolutions import convolutions, tokens
from jax_attn.parity.bugs.general import factors, narrowed_parameters, precisions
from jax_attn.parity.bugs.heads import (
    angles,
    casts,
    joins,
    orders,
    packings,
    rotations,
)
from jax_attn.parity.bugs.layers import (
    added_biases,
    centred,
    embeddings,
    epsilons,
    gains,
    layer_norms,
    norm_groups,
    normalized,
    projections,
    sums,
    unnormalized,
)
from jax_attn.parity.bugs.masks import (
    empty_rows_added,
    empty_rows_replaced,
    hidden_keys,
    softmaxes,
)

CATALOGUE: dict[str, tuple[Callable[[OperatorCall], Iterator[Bug]], ...]] = {
    "_safe_softmax": (softmaxes,),
    "_softmax": (softmaxes,),
    "_softmax_backward_data": (empty_rows_replaced,),
    "_to_copy": (casts,),
    "add": (epsilons, hidden_keys, gains, added_biases, sums),
    "addmm": (projections,),
    "bmm": (projections, orders, angles),
    "cat": (rotations,),
    "clone": (joins,),
    "convolution": (convolutions,),
    "div": (factors, unnormalized),
    "embedding": (embeddings,),
    "gelu": (activations,),
    "gelu_backward": (derivatives,),
    "index": (tokens,),
    "masked_fill": (hidden_keys, empty_rows_added),
    "mean": (tokens,),
    "mm": (projections, angles),
    "mul": (gains, angles, centred, factors),
    "native_batch_norm": (epsilons,),
    "native_group_norm": (epsilons, norm_groups),
    "native_layer_norm": (epsilons, layer_norms),
    "_fused_rms_norm": (epsilons,),
    "pow": (centred,),
    "relu": (activations,),
    "select": (tokens,),
    "sigmoid": (activations,),
    "silu": (activations,),
    "silu_backward": (derivatives,),
    "split": (packings,),
    "tanh": (activations,),
    "topk": (normalized,),
    "where": (hidden_keys, empty_rows_added),
}
"""Operator -> bugs of its calls. Scales and precisions are tried for every operator."""


def bugs_of(call: OperatorCall) -> Iterator[Bug]:
    """Yield the changes of a call that a port may make; none of a call with complex numbers."""
    if any(isinstance(x, Tensor) and x.is_complex() for x in call.args):
        return
    for of_operator in CATALOGUE.get(call.name, ()):
        yield from of_operator(call)
    yield from narrowed_parameters(call)
    yield from precisions(call)
