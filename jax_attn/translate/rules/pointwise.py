"""Operators that treat each element alike."""

from jax_attn.translate.rules.rule import Rule


def _scaled(sign: str, other: object, alpha: object) -> str:
    scaled = "other" if alpha == 1 else "alpha * other"
    return f"self {sign} {scaled}"


def add(other: object, alpha: object) -> str:
    return _scaled("+", other, alpha)


def sub(other: object, alpha: object) -> str:
    return _scaled("-", other, alpha)


POINTWISE: dict[str, Rule] = {
    "aten.add.Tensor": add,
    "aten.sub.Tensor": sub,
    "aten.mul.Tensor": "self * other",
    "aten.div.Tensor": "self / other",
    "aten.neg.default": "-self",
    "aten.cos.default": "jnp.cos(self)",
    "aten.sin.default": "jnp.sin(self)",
    "aten.rsqrt.default": "jax.lax.rsqrt(self)",
    "aten.silu.default": "jax.nn.silu(self)",
}
