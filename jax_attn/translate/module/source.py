"""Write the text of the file: imports, functions that JAX lacks, and the classes."""

import ast
import inspect
import shutil
import subprocess
from collections.abc import Sequence

from jax_attn.translate.module.classes import Class
from jax_attn.translate.module.places.functions import FileFunction
from jax_attn.translate.rules.expression import names_in
from jax_attn.translate.rules.written import FUNCTIONS

_IMPORTS = {
    "math": "import math\n",
    "jax": "import jax",
    "jnp": "import jax.numpy as jnp",
    "nnx": "from flax import nnx",
    "Array": "from jax import Array",
}


def _unparsed(statements: Sequence[ast.stmt]) -> str:
    text = ast.unparse(ast.fix_missing_locations(ast.Module(list(statements), [])))
    return "\n".join(map(_without_parentheses, text.splitlines()))


def _without_parentheses(line: str) -> str:
    """Write `return a, b` in place of `return (a, b)`, as a person does."""
    start = line[: len(line) - len(line.lstrip())]
    if line.strip().startswith("return (") and line.endswith(")"):
        value = ast.parse(line.strip()[len("return ") :], mode="eval").body
        if isinstance(value, ast.Tuple) and len(value.elts) > 1:
            return f"{start}return {', '.join(map(ast.unparse, value.elts))}"
    return line


def _indented(text: str, depth: int) -> str:
    return "\n".join("    " * depth + line if line else line for line in text.splitlines())


def class_text(one: Class) -> str:
    """Write one class."""
    lines = [f"class {one.name}(nnx.Module):"]
    arguments = [name for name in one.arguments if not one.is_optional(name)]
    arguments += [f"{name}=None" for name in one.arguments if one.is_optional(name)]
    head = "".join(f"{argument}, " for argument in arguments)
    body = _unparsed(one.init) or "pass"
    lines += [f"    def __init__(self, {head}*, rngs: nnx.Rngs):", _indented(body, 2), ""]
    given = ""
    for name, is_always_given in one.signature.items():
        # All that follows an argument that may be left out may be left out too.
        is_optional = "=None" in given or not is_always_given
        given += f", {name}" + ("=None" if is_optional else "")
    if not one.body:
        return "\n".join(lines[:-1])
    lines += [f"    def __call__(self{given}):", _indented(_unparsed(one.body), 2)]
    return "\n".join(lines)


def _functions(text: str) -> list[str]:
    """Return the source of each function of `written` that a text uses, and of those they use."""
    found: dict[str, str] = {}
    waiting = [text]
    while waiting:
        for name in sorted(names_in(ast.parse(waiting.pop()))):
            if name in FUNCTIONS and name not in found:
                found[name] = inspect.getsource(FUNCTIONS[name])
                waiting.append(found[name])
    return list(found.values())[::-1]


def formatted(text: str) -> str:
    """Format a file as ruff does, where ruff is installed."""
    ruff = shutil.which("ruff")
    if ruff is None:
        return text
    done = subprocess.run(
        [ruff, "format", "--isolated", "--line-length", "100", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def _own_functions(functions: Sequence[FileFunction], text: str) -> list[str]:
    """Write the functions that a text calls, and those that they call before them."""
    kept: list[str] = []
    for one in functions[::-1]:
        if one.name in names_in(ast.parse(text)):
            head = f"def {one.name}({', '.join(one.parameters)}):"
            kept.insert(0, f"{head}\n{_indented(_unparsed(one.body), 1)}")
            text += "\n" + kept[0]
    return kept


def file_text(classes: Sequence[Class], functions: Sequence[FileFunction], title: str) -> str:
    """Write the file."""
    texts = [class_text(one) for one in classes]
    texts = [*_own_functions(functions, "\n".join(texts)), *texts]
    body = "\n\n\n".join(texts)
    everything = "\n\n\n".join([*_functions(body), body])
    names = names_in(ast.parse(everything))
    imports = [line for name, line in _IMPORTS.items() if name in names]
    parts = [f'"""{title}"""\n', "\n".join(imports) + "\n"]
    return formatted("\n\n".join([*parts, everything]) + "\n")
