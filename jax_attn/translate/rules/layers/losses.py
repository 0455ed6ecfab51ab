"""Write losses of `torch.nn.functional`."""

from typing import Any

from jax_attn.translate.rules.calls import call
from jax_attn.translate.rules.rule import Array, Rule

NONE, MEAN, SUM = 0, 1, 2
IGNORED = -100
REDUCTIONS = {NONE: '"none"', MEAN: None, SUM: '"sum"'}


def reduced(value: str, reduction: int) -> str:
    """Write the mean or the sum of a loss, or the loss of each element."""
    return {NONE: value, MEAN: f"({value}).mean()", SUM: f"({value}).sum()"}[reduction]


def loss(template: str) -> Any:
    """Make the rule of a loss of each element, which `reduction` reduces."""
    return lambda reduction: reduced(template, reduction)


def smooth_l1(beta: float, reduction: int) -> str:
    if beta == 0:
        raise NotImplementedError("a beta of 0; torch.nn.functional calls l1_loss then")
    value = "huber(self - target)" if beta == 1 else "huber(self - target, beta) / beta"
    return reduced(value, reduction)


def huber(delta: float, reduction: int) -> str:
    return reduced(call("huber", "self - target", None if delta == 1 else "delta"), reduction)


def binary_cross_entropy(weight: Array | None, reduction: int) -> str:
    value = "binary_cross_entropy(self, target)"
    return reduced(value if weight is None else f"weight * {value}", reduction)


def with_logits(weight: Array | None, pos_weight: Array | None, reduction: int) -> str:
    positive = "target" if pos_weight is None else "pos_weight * target"
    positive = f"{positive} * jax.nn.log_sigmoid(self)"
    scale = "-" if weight is None else "-weight * "
    value = f"{scale}({positive} + (1 - target) * jax.nn.log_sigmoid(-self))"
    return reduced(value, reduction)


def divergence(log_target: bool, reduction: int) -> str:
    plain = "jax.scipy.special.xlogy(target, target) - target * self"
    value = "jnp.exp(target) * (target - self)" if log_target else plain
    return reduced(value, reduction)


def _of_classes(
    function: str,
    weight: Array | None,
    reduction: int,
    ignore_index: int = IGNORED,
    *further: str | None,
    **named: Any,
) -> str:
    """Write a loss by a function of the file, which reduces it itself."""
    return call(
        function,
        "self",
        "target",
        *further,
        None if weight is None else "weight",
        ignore_index=None if ignore_index == IGNORED else ignore_index,
        **named,
        reduction=REDUCTIONS[reduction],
    )


def negative_log_likelihood(weight: Array | None, reduction: int, ignore_index: int) -> str:
    return _of_classes("nll_loss", weight, reduction, ignore_index)


def nll_with_weight(weight: Array | None, reduction: int, ignore_index: int) -> tuple[str, str]:
    value = negative_log_likelihood(weight, reduction, ignore_index)
    if reduction == NONE:
        return value, "jnp.zeros(())"
    if weight is not None:
        return value, f"jnp.where(target == {ignore_index}, 0, weight[target]).sum()"
    return value, f"(target != {ignore_index}).sum().astype(self.dtype)"


def cross_entropy(
    self: Array,
    target: Array,
    weight: Array | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> str:
    if target.is_floating:
        smoothing = "label_smoothing" if label_smoothing else None
        return _of_classes("soft_cross_entropy", weight, reduction, label_smoothing=smoothing)
    log_probabilities = f"jax.nn.log_softmax(self{', axis=1' if self.rank > 2 else ''})"
    if label_smoothing:
        further = (weight, reduction, ignore_index, "label_smoothing")
        return _of_classes("smooth_cross_entropy", *further)
    value = negative_log_likelihood(weight, reduction, ignore_index)
    return value.replace("self", log_probabilities, 1)


def poisson(log_input: bool, full: bool, reduction: int) -> str:
    if full:
        raise NotImplementedError("the Poisson loss with Stirling's term")
    plain = "input - target * jnp.log(input + eps)"
    return reduced("jnp.exp(input) - target * input" if log_input else plain, reduction)


def hinge(reduction: int) -> str:
    apart = "clamp(margin - self, 0)"
    value = f"jnp.where(target == 1, self, 0) + jnp.where(target == -1, {apart}, 0)"
    return reduced(value, reduction)


def ranking(reduction: int) -> str:
    return reduced("clamp(-target * (input1 - input2) + margin, 0)", reduction)


LOSSES: dict[str, Rule] = {
    "aten.mse_loss.default": loss("jnp.square(self - target)"),
    "aten.l1_loss.default": loss("absolute(self - target)"),
    "aten.smooth_l1_loss.default": smooth_l1,
    "aten.huber_loss.default": huber,
    "aten.soft_margin_loss.default": loss("jnp.log1p(jnp.exp(-target * self))"),
    "aten.binary_cross_entropy.default": binary_cross_entropy,
    "aten.binary_cross_entropy_with_logits.default": with_logits,
    "aten.kl_div.default": divergence,
    "aten.nll_loss.default": negative_log_likelihood,
    "aten.nll_loss_nd.default": negative_log_likelihood,
    "aten.nll_loss2d.default": negative_log_likelihood,
    "aten.nll_loss_forward.default": nll_with_weight,
    "aten.nll_loss2d_forward.default": nll_with_weight,
    "aten.cross_entropy_loss.default": cross_entropy,
    "aten.poisson_nll_loss.default": poisson,
    "aten.hinge_embedding_loss.default": hinge,
    "aten.margin_ranking_loss.default": ranking,
}
