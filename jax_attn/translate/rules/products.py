"""Products of matrices, and what is made of them."""

from typing import Any

from jax_attn.translate.rules.rule import Array, Rule


def linear(weight: Array, bias: Array | None) -> str:
    product = "input @ weight.T" if weight.rank == 2 else "input @ weight"
    return product if bias is None else f"{product} + bias"


def added(product: str) -> Any:
    """Make the rule of `beta * self + alpha * product`."""

    def rule(beta: Any, alpha: Any) -> str:
        scaled = product if alpha == 1 else f"alpha * ({product})"
        if beta == 0:  # torch does not read `self` then, be it NaN.
            return scaled
        return f"{'self' if beta == 1 else 'beta * self'} + {scaled}"

    return rule


PRODUCTS: dict[str, Rule] = {
    "aten.linear.default": linear,
    "aten.matmul.default": "self @ other",
    "aten.mm.default": "self @ mat2",
    "aten.bmm.default": "self @ mat2",
    "aten.mv.default": "self @ vec",
    "aten.dot.default": "self @ tensor",
    "aten.addmm.default": added("mat1 @ mat2"),
    "aten.addmv.default": added("mat @ vec"),
    "aten.baddbmm.default": added("batch1 @ batch2"),
    "aten.outer.default": "jnp.outer(self, vec2)",
    "aten.einsum.default": "jnp.einsum(equation, *tensors)",
}
