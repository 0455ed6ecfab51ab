"""Changes of a port's source: mistakes, which a port may make, and styles, which change no number.

A change is one replaced expression. Its place and its kind are the label of the port that has it.
"""

import ast
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

Rewrite = Callable[[ast.expr], str | None]
"""An expression -> the text that replaces it, or None where the change has no place."""


@dataclass(frozen=True)
class Change:
    """One replaced expression of a source. kind: in `MISTAKES` or `STYLES`. line: from 1."""

    kind: str
    line: int
    start: int
    end: int
    text: str


# --- what an expression is ------------------------------------------------------------------------


def _called(node: ast.AST) -> str:
    """The dotted name of what is called; "" for anything else."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _method(node: ast.AST, name: str) -> ast.Call | None:
    """The call, if it is of a method with this name."""
    is_it = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node if is_it and node.func.attr == name else None


def _is_child(node: ast.AST) -> bool:
    """Whether this is a call of one of the module's own children."""
    name = _called(node)
    return name.startswith("self.") and name.count(".") == 1 and len(node.args) >= 1


def _number(node: ast.AST) -> float | None:
    is_number = isinstance(node, ast.Constant) and isinstance(node.value, float)
    return node.value if is_number else None


def _with(node: ast.Call, **keywords: ast.expr) -> str:
    """The call with these keywords in place of its own of that name."""
    made = deepcopy(node)
    made.keywords = [k for k in made.keywords if k.arg not in keywords]
    made.keywords += [ast.keyword(name, value) for name, value in keywords.items()]
    return ast.unparse(made)


def _binary(node: ast.AST, *operators: type[ast.operator]) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, operators)


# --- mistakes -------------------------------------------------------------------------------------


def _other_gelu(node: ast.expr) -> str | None:
    if _called(node) != "jax.nn.gelu":
        return None
    given = {k.arg: ast.literal_eval(k.value) for k in node.keywords}
    return _with(node, approximate=ast.Constant(not given.get("approximate", True)))


_OTHERS = {
    "jax.nn.silu": "jax.nn.gelu",
    "jax.nn.relu": "jax.nn.silu",
    "jnp.tanh": "jax.nn.hard_tanh",
    "jax.nn.sigmoid": "jax.nn.hard_sigmoid",
}


def _other_activation(node: ast.expr) -> str | None:
    other = _OTHERS.get(_called(node))
    return other and f"{other}({', '.join(map(ast.unparse, node.args))})"


def _small_constant(node: ast.expr) -> str | None:
    value = _number(node)
    return repr(10 * value) if value is not None and 0 < value <= 1e-4 else None


def _larger_constant(node: ast.expr) -> str | None:
    """A constant beside an operator: those among arguments may be rates, or initial values."""
    if not _binary(node, ast.Add, ast.Sub, ast.Mult, ast.Div):
        return None
    made = deepcopy(node)
    for side in ("left", "right"):
        value = _number(getattr(made, side))
        if value is not None and 1e-4 < abs(value) < 1e6:
            setattr(made, side, ast.Constant(1.02 * value))
            return ast.unparse(made)
    return None


def _without_division(node: ast.expr) -> str | None:
    is_it = _binary(node, ast.Div) and _number(node.right) is not None
    return ast.unparse(node.left) if is_it else None


def _other_axis(node: ast.expr) -> str | None:
    is_it = _called(node) == "jax.nn.softmax"
    return _with(node, axis=ast.Constant(-2)) if is_it else None


def _heads_by_reshape(node: ast.expr) -> str | None:
    """`x.reshape(B, T, N, H).swapaxes(1, 2)` -> `x.reshape(B, N, T, H)`"""
    swapped = _method(node, "swapaxes")
    inner = swapped and _method(swapped.func.value, "reshape")
    if not inner or [ast.unparse(a) for a in swapped.args] != ["1", "2"] or len(inner.args) < 3:
        return None
    sizes = [ast.unparse(a) for a in inner.args]
    sizes[1], sizes[2] = sizes[2], sizes[1]
    return f"{ast.unparse(inner.func.value)}.reshape({', '.join(sizes)})"


_EDGES = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}


def _other_edge(node: ast.expr) -> str | None:
    if not isinstance(node, ast.Compare) or type(node.ops[0]) not in _EDGES:
        return None
    edge = _EDGES[type(node.ops[0])]
    return f"{ast.unparse(node.left)} {edge} {ast.unparse(node.comparators[0])}"


_FILL = re.compile(r"jnp\.finfo\(jnp\.float32\)\.min|-jnp\.inf|-[0-9.e+]+")


def _masked(node: ast.AST) -> tuple[str, str, str] | None:
    """Of `jnp.where(visible, scores, fill)`, or hidden ones first: condition, scores and fill."""
    if _called(node) != "jnp.where" or len(node.args) != 3:
        return None
    condition, one, other = map(ast.unparse, node.args)
    if _FILL.fullmatch(other):
        return condition, one, other
    return (f"~({condition})", other, one) if _FILL.fullmatch(one) else None


def _mask_inverted(node: ast.expr) -> str | None:
    found = _masked(node)
    return found and f"jnp.where({found[0]}, {found[2]}, {found[1]})"


def _mask_left_out(node: ast.expr) -> str | None:
    found = _masked(node)
    return found and found[1]


def _without_residual(node: ast.expr) -> str | None:
    is_it = _binary(node, ast.Add) and isinstance(node.left, ast.Name) and _is_child(node.right)
    return ast.unparse(node.right) if is_it else None


def _other_sign(node: ast.expr) -> str | None:
    if not _binary(node, ast.Add, ast.Sub) or _number(node.left) or _number(node.right):
        return None
    sign = "-" if isinstance(node.op, ast.Add) else "+"
    return f"{ast.unparse(node.left)} {sign} ({ast.unparse(node.right)})"


def _without_bias(node: ast.expr) -> str | None:
    return f"{ast.unparse(node)} - {_called(node)}.bias[...]" if _is_child(node) else None


def _one_later(node: ast.expr) -> str | None:
    return f"{ast.unparse(node)} + 1" if _called(node) == "jnp.arange" else None


def _tiled(node: ast.expr) -> str | None:
    if _called(node) != "jnp.repeat" or len(node.args) < 2:
        return None
    axis = next((ast.unparse(k.value) for k in node.keywords if k.arg == "axis"), "None")
    array, count = map(ast.unparse, node.args[:2])
    return f"jnp.concatenate([{array}] * {count}, axis={axis})"


def _in_bfloat16(node: ast.expr) -> str | None:
    if not _binary(node, ast.MatMult):
        return None
    left, right = (f"({ast.unparse(x)}).astype(jnp.bfloat16)" for x in (node.left, node.right))
    return f"({left} @ {right}).astype(jnp.float32)"


def _around_child(template: str, node: ast.expr) -> str | None:
    return template.format(ast.unparse(node)) if _is_child(node) else None


def _other_fill(node: ast.expr) -> str | None:
    return "-10.0" if ast.unparse(node) == "jnp.finfo(jnp.float32).min" else None


MISTAKES: dict[str, Rewrite] = {
    "gelu, the other one": _other_gelu,
    "another activation": _other_activation,
    "small constant, 10 times": _small_constant,
    "constant, 2% larger": _larger_constant,
    "division left out": _without_division,
    "softmax over another axis": _other_axis,
    "heads by a reshape": _heads_by_reshape,
    "edge of a comparison": _other_edge,
    "mask the other way round": _mask_inverted,
    "mask left out": _mask_left_out,
    "masked scores at -10": _other_fill,
    "residual left out": _without_residual,
    "sign": _other_sign,
    "bias left out": _without_bias,
    "index one later": _one_later,
    "heads tiled": _tiled,
    "product in bfloat16": _in_bfloat16,
    "result in bfloat16": partial(_around_child, "{}.astype(jnp.bfloat16).astype(jnp.float32)"),
    "gradient stopped": partial(_around_child, "jax.lax.stop_gradient({})"),
    "1% more": partial(_around_child, "1.01 * {}"),
}

# --- styles ---------------------------------------------------------------------------------------


def _written_out(name: str, template: str, node: ast.expr) -> str | None:
    is_it = _called(node) == name and len(node.args) == 1
    return template.format(ast.unparse(node.args[0])) if is_it else None


def _softmax(node: ast.expr) -> str | None:
    if _called(node) != "jax.nn.softmax" or len(node.args) != 1 or node.keywords:
        return None
    written = "(lambda s: (lambda e: e / e.sum(-1, keepdims=True))(jnp.exp(s - {})))({})"
    return written.format("s.max(-1, keepdims=True)", ast.unparse(node.args[0]))


def _gelu(node: ast.expr) -> str | None:
    exact = [(k.arg, ast.unparse(k.value)) for k in getattr(node, "keywords", ())]
    if _called(node) != "jax.nn.gelu" or exact != [("approximate", "False")]:
        return None
    written = "(lambda s: 0.5 * s * (1 + jax.lax.erf(s * 0.7071067811865476)))({})"
    return written.format(ast.unparse(node.args[0]))


def _einsum(node: ast.expr) -> str | None:
    if not _binary(node, ast.MatMult):
        return None
    left, right = ast.unparse(node.left), ast.unparse(node.right)
    return f"jnp.einsum('...ij,...jk->...ik', {left}, {right})"


def _as_product(node: ast.expr) -> str | None:
    value = _number(node.right) if _binary(node, ast.Div) else None
    return f"({ast.unparse(node.left)}) * {1 / value!r}" if value else None


def _exchanged(node: ast.expr) -> str | None:
    is_it = _binary(node, ast.Add) and isinstance(node.left, ast.Name) and _is_child(node.right)
    return f"{ast.unparse(node.right)} + {ast.unparse(node.left)}" if is_it else None


STYLES: dict[str, Rewrite] = {
    "softmax written out": _softmax,
    "gelu written out": _gelu,
    "silu written out": partial(
        _written_out, "jax.nn.silu", "(lambda s: s / (1 + jnp.exp(-s)))({})"
    ),
    "products by einsum": _einsum,
    "divisions as products": _as_product,
    "sums exchanged": _exchanged,
}

# --- places ---------------------------------------------------------------------------------------


def places(source: str, kinds: dict[str, Rewrite]) -> Iterator[Change]:
    """Yield every change of these kinds that the source has a place for, in the order of places."""
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.expr):
            continue
        start = lines[node.lineno - 1] + node.col_offset
        end = lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        for kind, rewrite in kinds.items():
            if (text := rewrite(node)) is not None:
                yield Change(kind, node.lineno, start, end, f"({text})")


def changed(source: str, change: Change) -> str:
    """Return the source with one change."""
    return source[: change.start] + change.text + source[change.end :]


def in_style(source: str, kind: str) -> str | None:
    """Return the source in a style wherever it has a place; None if it has none."""
    found = None
    while (change := next(places(found or source, {kind: STYLES[kind]}), None)) is not None:
        text = changed(found or source, change)
        if text == found:
            break
        found = text
    return found
