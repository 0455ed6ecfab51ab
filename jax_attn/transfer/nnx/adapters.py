"""Low-rank adapters: merged into the weights that they change, and never dropped in silence."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_attn.transfer.arrays import as_numpy
from jax_attn.transfer.nnx.variables import Weights, spelled, state_of
from jax_attn.transfer.problems import Problem, TransferError

_ADAPTER = re.compile(r"(?i:(?:^|[._])(?:lora|adapter))|Lo(?:RA|ra)|Adapter")
"""A word of a path, as in "q.lora_a" and "BottleneckAdapter_0", but not as in "exploration"."""
_FACTOR = re.compile(r"(?P<before>.*?)[._]?(lora[._])?lora_(?P<of>kernel_)?(?P<side>[abAB])$")
_ORDERED = re.compile(r"(?:^|[._])(?P<name>kernel|weight)$")
"""The names of weights whose order of axes they tell: (in, out) of a kernel, (out, in) of a weight.
"""
_UNORDERED = "the weight is square, and its name does not tell the order of its axes: pass a tree "
_UNORDERED += "that names it 'kernel' if it is (in, out), or 'weight' if it is (out, in)"
_WRAPPED = "base_module"
"""The attribute of an nnx.LoRA that holds the layer to which it adds."""


def merge_lora(module: Weights, *, scale: float) -> nnx.State:
    """Return a port's state with each low-rank adapter added to its weight, W + scale * A @ B.

    The sum is computed in float64 and rounded once. Adapters are found by their names, `lora_a` and
    `lora_b` as flax and others have them or `lora_kernel_a` as Keras has; the weight is the array
    beside them, or below `base_module`, that has the shape of their product. If that is square, its
    name tells the order of its axes, (in, out) of a `kernel` and (out, in) of a `weight`, to which
    the product is turned: A @ B is (in, out), and B @ A, as torch keeps the factors, is (out, in).
    The state has the paths of the model without adapters, so that a table for it fits::

        transfer.export(transfer.merge_lora(port, scale=alpha / rank), layout, into=torch_module)

    Args:
      module: as for `export`; it is not changed.
      scale: the factor of the products. No array tells it: it is alpha / rank in most papers, and
        1 for `nnx.LoRA`.

    Raises:
      TransferError: a factor without its counterpart, without exactly one weight that it fits, or
        with a square weight of another name; the message lists every one. There are no adapters.
    """
    leaves = _leaves(state_of(module))
    factors = {path: match for path in leaves if (match := _FACTOR.fullmatch(path))}
    weights = {path: leaf for path, leaf in leaves.items() if path not in factors}
    problems: list[Problem] = []
    if not factors:
        text = "expected adapters, arrays named lora_a and lora_b, got none"
        problems.append(Problem("missing", "module", text))
    merged: dict[str, np.ndarray] = {}
    for path, match in factors.items():
        other = path[:-1] + {"a": "b", "b": "a", "A": "B", "B": "A"}[match["side"]]
        if other not in factors:
            problems.append(Problem("missing", other, f"expected it beside {path!r}"))
        elif match["side"] in "aA":
            a, b = (_array(leaves[x], x).astype(np.float64) for x in (path, other))
            fits = [*_fitting(a, b, _beside(match, weights))]
            if len(fits) == 1:
                ((base, product),) = fits
                before = merged.get(base, _array(weights[base], base).astype(np.float64))
                merged[base] = before + scale * product
            else:
                text = "expected one weight beside it that has the shape of its product, and one "
                text += f"order of its factors, got {[base for base, _ in fits] or 'none'}"
                hint = "" if all(_ORDERED.search(base) for base, _ in fits) else _UNORDERED
                problems.append(Problem("ambiguous" if fits else "missing", path, text, hint))
    if problems:
        raise TransferError("merging adapters", problems)
    for path, total in merged.items():
        array = jnp.asarray(total.astype(_array(weights[path], path).dtype))
        leaf = weights[path]
        weights[path] = leaf.replace(array) if isinstance(leaf, nnx.Variable) else array
    return nnx.from_flat_state([((_unwrapped(path),), leaf) for path, leaf in weights.items()])


def refuse_adapters(state: nnx.Pytree | nnx.State, read: Iterable[str]) -> list[Problem]:
    """Report adapters' arrays that an export would drop. read: the paths that the table reads."""
    dropped = _leaves(state).keys() - {*read}
    text = "an adapter's array, which no row of the table carries: without it, the model behaves "
    text += "otherwise"
    hint = "merge adapters first: transfer.merge_lora(module, scale=…), or add rows for them"
    names = (path for path in sorted(dropped) if _ADAPTER.search(path))
    return [Problem("refused", path, text, hint) for path in names]


def _leaves(state: nnx.Pytree | nnx.State) -> dict[str, Any]:
    """Return every array of a state by dotted path, or the nnx.Variable that holds it."""
    every = state if isinstance(state, nnx.State) else nnx.state(state)
    return {spelled(path): leaf for path, leaf in nnx.to_flat_state(every)}


def _array(leaf: Any, path: str) -> np.ndarray:
    return as_numpy(leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf, path)


def _beside(match: re.Match[str], weights: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the weights beside a factor, or that which its name begins with.

    Linen may hold factors in a collection of their own, whose name then comes first.
    """
    for before in (match["before"], match["before"].partition(".")[2]):
        named = [x for x in (before, f"{before}.kernel") if x in weights]
        prefixes = (f"{before}.", f"{before}.{_WRAPPED}.") if before else ("", f"{_WRAPPED}.")
        children = [
            path
            for path in weights
            if any(path.startswith(x) and "." not in path.removeprefix(x) for x in prefixes)
        ]
        found = named[:1] if named and (match["of"] or named[0] == before) else children
        if found:
            return {path: _array(weights[path], path) for path in found}
    return {}


def _fitting(
    a: np.ndarray, b: np.ndarray, weights: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each weight that a product of two factors fits, with every such product."""
    for path, weight in weights.items():
        ordered = _ORDERED.search(path)
        products: list[np.ndarray] = []
        for order, product, turned in _products(a, b):
            if product.ndim < 2 or product.shape != weight.shape:
                continue
            is_square = turned.shape == product.shape
            both = [product, turned] if is_square else [product]
            if is_square and ordered:
                both = [product if ordered["name"] == order else turned]
            for one in both:
                if not any(np.array_equal(one, other) for other in products):
                    products.append(one)
                    yield path, one


def _products(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield A @ B and, as torch keeps the factors, B @ A; stacked, or with axes of heads.

    Each has before it the name of the weights that have its order of axes, and behind it the
    product in the other order.
    """
    for order, left, right in (("kernel", a, b), ("weight", b, a)):
        if left.shape[-1] == right.shape[0]:
            product, first = np.tensordot(left, right, 1), left.ndim - 1
            yield order, product, product.transpose(*range(first, product.ndim), *range(first))
        is_stacked = left.ndim == right.ndim > 2 and left.shape[:-2] == right.shape[:-2]
        if is_stacked and left.shape[-1] == right.shape[-2]:
            product = left @ right
            yield order, product, product.swapaxes(-1, -2)


def _unwrapped(path: str) -> str:
    return ".".join(part for part in path.split(".") if part != _WRAPPED)
