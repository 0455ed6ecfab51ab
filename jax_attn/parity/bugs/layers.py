"""Bugs of norms, projections, sums, embeddings, and the weights that a router gives to experts."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from jax_attn.parity.bugs.bug import (
    Bug,
    Change,
    OperatorCall,
    arguments,
    float_tensors,
    is_number,
    result,
)

NORMS = {
    "native_batch_norm": 7,
    "native_group_norm": 7,
    "native_layer_norm": 4,
    "_fused_rms_norm": 3,
}
"""Operator of a norm -> the place of its epsilon."""
EPSILONS = (*(float(f"1e-{n}") for n in range(3, 13)), 0.0)
_LARGEST_EPSILON = 1e-2
_NO_MEAN = 1e-9
"""A mean below this share of a row's largest number is only rounding."""


def epsilons(call: OperatorCall) -> Iterator[Bug]:
    """Yield other epsilons of a norm, or of a sum with a small number."""
    at = NORMS.get(call.name, 1)
    if len(call.args) <= at or not is_number(call.args[at]):
        return
    own = float(call.args[at])
    if not 0 < own <= _LARGEST_EPSILON:
        return
    near = {float(f"{own * 10.0**n:g}") for n in range(-4, 5)} | set(EPSILONS)
    for epsilon in sorted(near, reverse=True):
        if not math.isclose(epsilon, own, rel_tol=1e-5):
            yield Bug(
                "epsilon",
                f"an epsilon of {epsilon:g} in place of {own:g}",
                arguments({at: epsilon}),
                epsilon,
            )


def layer_norms(call: OperatorCall) -> Iterator[Bug]:
    """Yield other norms in place of a layer norm."""
    bias = call.args[3]
    yield Bug("norm (RMS norm)", "an RMS norm in place of a layer norm", _norm(centred=False))
    yield Bug("norm (1 + weight)", "a norm that multiplies by 1 + weight", _norm(gain=1.0))
    yield Bug(
        "norm (variance over n - 1)", "a norm that divides the variance by n - 1", _norm(fewer=1)
    )
    if bias is not None:
        yield Bug("bias (left out)", "a norm without its bias", result(lambda y: y - bias))
    own = call.leaves[2]
    for other, weight in call.parameters.items() if own else ():
        bias_of_other = call.parameters.get(other.removesuffix("weight") + "bias")
        if other.endswith("weight") and other != own and weight.shape == call.args[2].shape:
            at = {2: weight} if bias is None else {2: weight, 3: bias_of_other}
            yield Bug("norm (of another)", f"`{other}` in place of `{own}`", arguments(at))


def norm_groups(call: OperatorCall) -> Iterator[Bug]:
    """Yield a group norm with another number of groups."""
    channels, own = call.args[4], call.args[6]
    for groups in (n for n in range(1, channels + 1) if channels % n == 0 and n != own):
        says = f"{groups} groups in place of {own}"
        yield Bug("norm (groups)", says, arguments({6: groups}), groups)


def _norm(*, centred: bool = True, gain: float = 0.0, fewer: int = 0) -> Change:
    def change(call: OperatorCall) -> Any:
        x, shape, weight, bias, epsilon = call.args[:5]
        axes = tuple(range(-len(shape), 0))
        y = x - x.mean(axes, keepdim=True) if centred else x
        count = math.prod(shape) - fewer
        y = y * torch.rsqrt(y.square().sum(axes, keepdim=True) / count + epsilon)
        y = y if weight is None else y * (weight + gain)
        return (y if bias is None else y + bias), *call.result()[1:]

    return change


def centred(call: OperatorCall) -> Iterator[Bug]:
    """Yield the square or the product of an RMS norm with the mean subtracted."""
    for i in float_tensors(call.args):
        x, other = call.args[i], call.args[1 - i]
        is_square = call.name == "pow" and other == 2
        if x.ndim < 2 or x.shape[-1] == 1 or not (is_square or _is_of_rows(other, x)):
            continue
        mean = x.mean(-1, keepdim=True)
        if float(mean.abs().max()) > _NO_MEAN * float(x.abs().max()):
            says = "a norm that subtracts the mean"
            yield Bug("norm (mean subtracted)", says, arguments({i: x - mean}))


def _is_of_rows(x: Any, of: Tensor) -> bool:
    """Return whether a tensor has one number for each row of another."""
    return isinstance(x, Tensor) and x.shape == (*of.shape[:-1], 1)


def gains(call: OperatorCall) -> Iterator[Bug]:
    """Yield 1 + weight in place of a norm's weight, or the reverse."""
    for i, name in enumerate(call.leaves):
        if name and call.args[i].ndim == 1:
            weight = call.args[i]
            if call.name == "mul":
                says = f"1 + `{name}` in place of `{name}`"
                yield Bug("norm (1 + weight)", says, arguments({i: 1 + weight}))
            elif is_number(call.args[1 - i]) and float(call.args[1 - i]) == 1.0:
                says = f"`{name}` in place of 1 + `{name}`"
                yield Bug("norm (weight)", says, result(lambda plus_one: plus_one - 1))


def projections(call: OperatorCall) -> Iterator[Bug]:
    """Yield products with a parameter with another bias, transposed, or with another parameter."""
    if call.name == "addmm":
        zero, twice = torch.zeros_like(call.args[0]), 2 * call.args[0]
        yield Bug("bias (left out)", "no bias", arguments({0: zero}))
        yield Bug("bias (twice)", "a bias added twice", arguments({0: twice}))
    for i, name in enumerate(call.leaves):
        if not name or call.args[i].ndim < 2:
            continue
        kernel = call.args[i]
        if kernel.shape[-1] == kernel.shape[-2]:
            yield Bug("transposed", f"`{name}` transposed", arguments({i: kernel.mT}))
        elif kernel.ndim == 2:
            other = kernel.T.contiguous().view(kernel.shape)
            says = f"`{name}` reshaped in place of transposed"
            yield Bug("transposed (reshaped)", says, arguments({i: other}))
        for other, value in call.parameters.items():
            if other == name or value.shape != call.parameters[name].shape:
                continue
            is_turned = tuple(kernel.shape) != tuple(value.shape) or (
                kernel.stride() != value.stride()
            )
            at = {i: value.mT if is_turned else value}
            says = f"`{other}` in place of `{name}`"
            if call.name == "addmm" and call.leaves[0]:
                own = call.leaves[0].rpartition(".")[2]
                bias = call.parameters.get(f"{other.rpartition('.')[0]}.{own}")
                if bias is not None and bias.shape == call.args[0].shape:
                    yield Bug("packed order", says, arguments({**at, 0: bias}))
                    says += ", with its own bias"
            yield Bug("packed order", says, arguments(at))


def added_biases(call: OperatorCall) -> Iterator[Bug]:
    """Yield sums whose bias is left out, or added twice."""
    for i, name in enumerate(call.leaves):
        if name and call.args[i].ndim == 1 and i < 2:
            bias, rest = call.args[i], call.args[1 - i]
            if isinstance(rest, Tensor) and rest.ndim > 1:
                zero, twice = torch.zeros_like(bias), 2 * bias
                yield Bug("bias (left out)", "no bias", arguments({i: zero}))
                yield Bug("bias (twice)", "a bias added twice", arguments({i: twice}))


def sums(call: OperatorCall) -> Iterator[Bug]:
    """Yield sums without one summand: a residual, or a bias that several rows share."""
    places = float_tensors(call.args)
    if places[:2] == [0, 1] and call.args[0].ndim == call.args[1].ndim > 1:
        for i, which in enumerate(("first", "second")):
            zero = torch.zeros_like(call.args[i])
            is_bias = call.args[i].numel() < call.args[1 - i].numel()
            name = "bias (left out)" if is_bias else "residual (left out)"
            name = "gradient (one path stopped)" if call.is_backward else name
            says = f"a sum that lacks its {which} summand"
            if (origin := call.origins[i] if call.origins else "") and not call.is_backward:
                says += f", the result of `{origin}`"
            yield Bug(name, says, arguments({i: zero}))


def embeddings(call: OperatorCall) -> Iterator[Bug]:
    """Yield an embedding that is read at other rows, or transposed."""
    weight, ids = call.args[:2]
    most = weight.shape[0] - 1
    shifts = {
        "position (all zero)": ("every id 0", ids * 0),
        "position (one too far)": ("ids one too large", ids + 1),
        "position (one too near)": ("ids one too small", ids - 1),
        "position (of the first row)": ("the ids of the first row", ids[:1].expand(ids.shape)),
        "position (counted from zero)": (
            "ids counted from 0",
            torch.arange(ids.shape[-1]).expand(ids.shape),
        ),
    }
    tried = [ids]
    for name, (says, others) in shifts.items():
        rows = others.clamp(0, most)
        if not any(torch.equal(rows, before) for before in tried):
            tried.append(rows)
            yield Bug(name, says, arguments({1: rows}))
    if weight.shape[0] == weight.shape[1]:
        yield Bug("transposed", "its table transposed", arguments({0: weight.T}))


_NEAR = 1e-6


def unnormalized(call: OperatorCall) -> Iterator[Bug]:
    """Yield rows that are not divided by their sum."""
    x, by = call.args[:2]
    if isinstance(x, Tensor) and isinstance(by, Tensor) and by.shape == (*x.shape[:-1], 1):
        total = x.sum(-1, keepdim=True)
        if bool(((by - total).abs() <= _NEAR * total.abs()).all()):
            says = "weights that are not divided by their sum"
            yield Bug("router (not normalized)", says, lambda call: call.args[0].clone())


def normalized(call: OperatorCall) -> Iterator[Bug]:
    """Yield the weights of the chosen experts divided by their sum."""
    says = "the chosen weights divided by their sum"
    yield Bug("router (normalized)", says, _divided)


def _divided(call: OperatorCall) -> tuple[Tensor, Tensor]:
    weights, chosen = call.result()
    return weights / weights.sum(-1, keepdim=True), chosen
