"""Write convolutions of any number of axes, channels first as torch has them."""

from typing import Any

from jax_attn.translate.rules.calls import call, known, spread, trailing
from jax_attn.translate.rules.rule import Array, Rule


def _batched(expression: str, input: Array, weight: Array, bias: Array | None) -> str:
    """Add the bias, and a batch of one if the input has none."""
    if input.rank < weight.rank:
        expression = expression.replace("input", "input[None]", 1) + "[0]"
    if bias is not None:
        expression += f" + {trailing('bias', weight.rank - 2)}"
    return expression


def _pairs(values: Any) -> Any:
    return tuple((value, value) for value in values)


def conv(
    input: Array,
    weight: Array,
    bias: Array | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> str:
    axes = weight.rank - 2
    dilation = spread(dilation, axes, "dilation")
    if isinstance(padding, str):
        written = f"'{padding.upper()}'"
    else:
        sides = spread(padding, axes, "padding")
        written = str(_pairs(sides)) if any(sides) else "'VALID'"
    convolved = call(
        "jax.lax.conv_general_dilated",
        "input",
        "weight",
        str(spread(stride, axes, "stride")),
        written,
        rhs_dilation=None if set(dilation) == {1} else dilation,
        feature_group_count=None if groups == 1 else groups,
    )
    return _batched(convolved, input, weight, bias)


def conv_transpose(
    input: Array,
    weight: Array,
    bias: Array | None,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: int,
    dilation: Any,
) -> str:
    axes = weight.rank - 2
    stride = spread(stride, axes, "stride")
    dilation = spread(dilation, axes, "dilation")
    sides = spread(padding, axes, "padding")
    more = spread(output_padding, axes, "output_padding")
    reach = [d * (k - 1) for d, k in zip(dilation, known(weight.shape[2:], "kernel"), strict=True)]
    padded = tuple((r - p, r - p + m) for r, p, m in zip(reach, sides, more, strict=True))
    dilated = None if set(dilation) == {1} else dilation
    if groups == 1:
        letters = "DHW"[-axes:]
        out = f"NC{letters}"
        convolved = call(
            "jax.lax.conv_transpose",
            "input",
            "weight",
            str(stride),
            str(padded),
            rhs_dilation=dilated,
            dimension_numbers=(out, f"OI{letters}", out),
            transpose_kernel=True,
        )
        return _batched(convolved, input, weight, bias)
    # lax.conv_transpose has no groups: this is what it calls, with the kernel turned by groups.
    convolved = call(
        "jax.lax.conv_general_dilated",
        "input",
        f"transposed_kernel(weight, {groups})",
        str((1,) * axes),
        str(padded),
        lhs_dilation=stride,
        rhs_dilation=dilated,
        feature_group_count=groups,
    )
    return _batched(convolved, input, weight, bias)


def convolution(
    input: Array,
    weight: Array,
    bias: Array | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> str:
    if transposed:
        return conv_transpose(
            input, weight, bias, stride, padding, output_padding, groups, dilation
        )
    return conv(input, weight, bias, stride, padding, dilation, groups)


CONVOLUTIONS: dict[str, Rule] = {
    "aten.conv1d.default": conv,
    "aten.conv2d.default": conv,
    "aten.conv3d.default": conv,
    "aten.conv1d.padding": conv,
    "aten.conv2d.padding": conv,
    "aten.conv3d.padding": conv,
    "aten.conv_transpose1d.default": conv_transpose,
    "aten.conv_transpose2d.input": conv_transpose,
    "aten.conv_transpose3d.input": conv_transpose,
    "aten.convolution.default": convolution,
    "aten._convolution.default": convolution,
}
