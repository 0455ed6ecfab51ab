"""Count the statements of a translated file and of the torch source that it stands for."""

import ast
import inspect
import textwrap

from torch import nn


def _in_functions(tree: ast.AST, names: tuple[str, ...] | None = None) -> int:
    """Count the statements of functions, of those with given names if there are any."""
    return sum(
        isinstance(each, ast.stmt)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and (names is None or function.name in names)
        for statement in function.body
        for each in ast.walk(statement)
        if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
    )


def written_statements(source: str) -> int:
    """Count the statements of all functions of a translated file, without docstrings."""
    return _in_functions(ast.parse(source))


def torch_statements(reference: nn.Module) -> int:
    """Count the statements of `__init__` and of all other methods of a reference's own classes.

    Layers of torch itself are not counted, nor are helpers outside of classes.
    """
    kinds = {type(module) for module in reference.modules()}
    own = [kind for kind in kinds if not kind.__module__.startswith("torch.")]
    sources = [textwrap.dedent(inspect.getsource(kind)) for kind in own]
    return sum(_in_functions(ast.parse(text), ("__init__", "forward")) for text in sources)
