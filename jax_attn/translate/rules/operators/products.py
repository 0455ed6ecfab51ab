"""Write products of matrices, and what is made of them."""

from collections.abc import Sequence
from typing import Any

from jax_attn.translate.rules.calls import call
from jax_attn.translate.rules.operands import replaced
from jax_attn.translate.rules.operators.reductions import norm
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


def crossed(dim: Any, self: Array, out: Array) -> str:
    if dim is None:  # torch takes the first axis of size 3.
        dim = next(n for n, size in enumerate(out.shape) if size == 3)
    return call("jnp.cross", "self", "other", axis=None if dim in (-1, out.rank - 1) else dim)


def contracted(dims_self: Any, dims_other: Any) -> str:
    return f"jnp.tensordot(self, other, ({list(dims_self)}, {list(dims_other)}))"


def distances(p: float) -> str:
    return call("distances", "x1", "x2", None if p == 2 else str(p))


def bilinear(bias: Array | None) -> str:
    product = 'jnp.einsum("...i,oij,...j->...o", input1, weight, input2)'
    return product if bias is None else f"{product} + bias"


def vecdot(dim: int, x: Array) -> str:
    return call("jnp.vecdot", "x", "y", axis=None if dim in (-1, x.rank - 1) else dim)


def pairwise_distance(x1: Array, x2: Array, p: float, keepdim: bool) -> str:
    return replaced(norm(p, "-1", keepdim), self="(x1 - x2 + eps)")


def cosine_similarity(x1: Array, x2: Array, dim: int) -> str:
    return f"cosine_similarity(x1, x2, {dim}, eps)"


def cholesky(upper: bool) -> str:
    return call("jnp.linalg.cholesky", "self", upper=upper or None)


def qr(mode: str) -> str:
    if mode == "r":
        raise NotImplementedError("only the triangle of a QR decomposition")
    return call("jnp.linalg.qr", "A", mode=None if mode == "reduced" else f'"{mode}"')


def svd(full_matrices: bool) -> str:
    return call("jnp.linalg.svd", "A", full_matrices=None if full_matrices else "False")


def eigh(UPLO: str) -> str:
    return call("jnp.linalg.eigh", "self", UPLO=None if UPLO == "L" else f'"{UPLO}"')


def solved(left: bool, A: Array, B: Array) -> str:
    if not left:
        return "jnp.linalg.solve(A.mT, B.mT).mT"
    if B.rank == 1 or (A.rank - 1 == B.rank and A.shape[:-1] == B.shape):
        return (
            "jnp.linalg.solve(A, B)" if B.rank == 1 else "jnp.linalg.solve(A, B[..., None])[..., 0]"
        )
    return "jnp.linalg.solve(A, B)"


def triangular(upper: bool, left: bool, unitriangular: bool) -> str:
    return call(
        "jax.lax.linalg.triangular_solve",
        "self",
        "B",
        left_side=left or None,
        lower=not upper or None,
        unit_diagonal=unitriangular or None,
    )


def _chained(name: str, matrices: Sequence[Array]) -> str:
    return " @ ".join(f"{name}[{position}]" for position in range(len(matrices)))


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
    "aten.ger.default": "jnp.outer(self, vec2)",
    "aten.vdot.default": "jnp.vdot(self, other)",
    "aten.inner.default": "jnp.inner(self, other)",
    "aten.kron.default": "jnp.kron(self, other)",
    "aten.addbmm.default": added("(batch1 @ batch2).sum(0)"),
    "aten.addr.default": added("jnp.outer(vec1, vec2)"),
    "aten.einsum.default": "jnp.einsum(equation, *tensors)",
    "aten.cross.default": crossed,
    "aten.linalg_cross.default": crossed,
    "aten.tensordot.default": contracted,
    "aten.cdist.default": distances,
    "aten._cdist_forward.default": distances,
    "aten.bilinear.default": bilinear,
    "aten.linalg_matmul.default": "self @ other",
    "aten.linalg_vecdot.default": vecdot,
    "aten.pairwise_distance.default": pairwise_distance,
    "aten.cosine_similarity.default": cosine_similarity,
    "aten.chain_matmul.default": lambda matrices: _chained("matrices", matrices),
    "aten.linalg_multi_dot.default": lambda tensors: _chained("tensors", tensors),
    "aten.matrix_power.default": "jnp.linalg.matrix_power(self, n)",
    "aten.linalg_matrix_power.default": "jnp.linalg.matrix_power(self, n)",
    "aten.inverse.default": "jnp.linalg.inv(self)",
    "aten.linalg_inv.default": "jnp.linalg.inv(A)",
    "aten.det.default": "jnp.linalg.det(self)",
    "aten.linalg_det.default": "jnp.linalg.det(A)",
    "aten.linalg_slogdet.default": "jnp.linalg.slogdet(A)",
    "aten.slogdet.default": "jnp.linalg.slogdet(self)",
    "aten.logdet.default": "jnp.log(jnp.linalg.det(self))",
    "aten.linalg_cholesky.default": cholesky,
    "aten.linalg_qr.default": qr,
    "aten.linalg_svd.default": svd,
    "aten.linalg_svdvals.default": "jnp.linalg.svd(A, compute_uv=False)",
    "aten.linalg_eigh.default": eigh,
    "aten.linalg_eigvalsh.default": "jnp.linalg.eigvalsh(self, UPLO)",
    "aten.linalg_solve.default": solved,
    "aten.linalg_solve_triangular.default": triangular,
}
