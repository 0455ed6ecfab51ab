"""Write operators that draw random numbers in training mode.

A rule names `rngs` the stream of the module's random keys, and `dropout` an `nnx.Dropout` that has
the rate of the operator.
"""

from collections.abc import Callable

from jax_attn.translate.rules.calls import call, refused
from jax_attn.translate.rules.rule import Array, Rule

RATES = {
    "jax_attn.dropout.default": "p",
    "aten.scaled_dot_product_attention.default": "dropout_p",
}
"""Operators that drop, each with the argument that is the rate."""


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


def _bernoulli(p: str) -> Callable[[Array], str]:
    def rule(self: Array) -> str:
        return f"jax.random.bernoulli(rngs(), {p}, self.shape).astype(jnp.{self.dtype})"

    return rule


def _drawn(function: str, shape: str) -> Callable[[Array], str]:
    def rule(out: Array) -> str:
        dtype = None if out.dtype == "float32" else f"jnp.{out.dtype}"
        return call(f"jax.random.{function}", "rngs()", shape, dtype)

    return rule


def normal_functional(mean: float, std: float, out: Array) -> str:
    return f"mean + std * {_drawn('normal', 'self.shape')(out)}"


_DRAWS = refused("it draws random numbers")

RANDOM: dict[str, Rule] = {
    "jax_attn.dropout.default": "dropout(input)",
    "aten.bernoulli.p": _bernoulli("p"),
    "aten.bernoulli.default": _bernoulli("self"),
    "aten.rand.default": _drawn("uniform", "size"),
    "aten.rand_like.default": _drawn("uniform", "self.shape"),
    "aten.randn.default": _drawn("normal", "size"),
    "aten.randn_like.default": _drawn("normal", "self.shape"),
    "aten.normal_functional.default": normal_functional,
    "aten.dropout.default": dropout,
    "aten.dropout_.default": dropout,
    "aten.feature_dropout.default": dropout,
    "aten.alpha_dropout.default": dropout,
    "aten.feature_alpha_dropout.default": dropout,
    "aten.native_dropout.default": native_dropout,
    "aten.rrelu.default": rrelu,
    **dict.fromkeys(
        (
            "aten.bernoulli.Tensor",
            "aten.exponential.default",
            "aten.multinomial.default",
            "aten.randint.default",
            "aten.randint.low",
            "aten.randperm.default",
            "aten.uniform.default",
        ),
        _DRAWS,
    ),
}
