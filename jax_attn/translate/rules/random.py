"""Operators that draw random numbers in training mode."""

from jax_attn.translate.rules.calls import refused
from jax_attn.translate.rules.rule import Rule


def dropout(p: float, train: bool) -> str:
    if train and p:
        raise NotImplementedError("dropout in training mode")
    return "input"


def native_dropout(p: float, train: bool | None) -> tuple[str, str]:
    return dropout(p, train is not False), "jnp.ones_like(input, dtype=bool)"


def rrelu(training: bool) -> str:
    if training:
        raise NotImplementedError("rrelu in training mode")
    return "jnp.where(self > 0, self, (lower + upper) / 2 * self)"


_DRAWS = refused("it draws random numbers")

RANDOM: dict[str, Rule] = {
    "aten.dropout.default": dropout,
    "aten.dropout_.default": dropout,
    "aten.feature_dropout.default": dropout,
    "aten.alpha_dropout.default": dropout,
    "aten.feature_alpha_dropout.default": dropout,
    "aten.native_dropout.default": native_dropout,
    "aten.rrelu.default": rrelu,
    **dict.fromkeys(
        (
            "aten.bernoulli.default",
            "aten.bernoulli.Tensor",
            "aten.bernoulli.p",
            "aten.exponential.default",
            "aten.multinomial.default",
            "aten.normal_functional.default",
            "aten.rand.default",
            "aten.rand_like.default",
            "aten.randint.default",
            "aten.randint.low",
            "aten.randn.default",
            "aten.randn_like.default",
            "aten.randperm.default",
            "aten.uniform.default",
        ),
        _DRAWS,
    ),
}
