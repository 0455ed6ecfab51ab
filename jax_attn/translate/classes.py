"""The classes of the file: one for the modules of a class of torch that do alike."""

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx import Node

from jax_attn import transfer
from jax_attn.translate.calls import Call, Traced
from jax_attn.translate.expression import DTYPES, Written, filled, literal, parsed
from jax_attn.translate.leaves import leaf
from jax_attn.translate.marks import named_leaves
from jax_attn.translate.method import Method, Tree, method

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LARGEST_LITERAL = 128


@dataclass
class Class:
    """A class of the file.

    Attributes:
      name: its name, torch's where one class of the file stands for torch's.
      paths: the modules that are its instances.
      arguments: what `__init__` takes, by name, with the value for each instance.
      init: the statements of `__init__`.
      method: `__call__`, with what differs between instances read from `self`.
      origin: the class of torch.
    """

    name: str
    paths: list[str]
    origin: type[nn.Module]
    arguments: dict[str, list[Any]] = field(default_factory=dict)
    init: list[ast.stmt] = field(default_factory=list)
    method: Method = field(default_factory=lambda: Method([], []))
    signature: list[str] = field(default_factory=list)
    always_given: set[str] = field(default_factory=set)


def _constants(statements: Sequence[ast.stmt]) -> list[ast.Constant]:
    return [
        node
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and not isinstance(node.value, bool)
    ]


class _Blank(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        is_number = isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
        return ast.Name("_", ast.Load()) if is_number else node


def _shape(statements: Sequence[ast.stmt]) -> str:
    """Return a text that is equal for statements that differ in numbers alone."""
    copied = ast.parse(ast.unparse(ast.fix_missing_locations(ast.Module(list(statements), []))))
    return ast.dump(_Blank().visit(copied))


class _Replaced(ast.NodeTransformer):
    def __init__(self, by_id: Mapping[int, Written]) -> None:
        self.by_id = by_id

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return self.by_id.get(id(node), node)


class Classes:
    """Arrange a traced reference as classes."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.modules = dict(traced.root.module.named_modules())
        self.calls: dict[str, list[Call]] = {}
        self.leaves: set[str] = set()
        self._collect(traced.root)
        self.tensors = list(traced.root.state.values())
        self.read = {name.rpartition(".")[0] for name in self.tensors}
        self.tree = Tree(
            sizes=traced.sizes,
            state=traced.state,
            signatures=self.signature,
            is_inlined=self.is_inlined,
            attribute=self.attribute,
            tensor=self.tensor,
            returned=traced.returned,
        )

    def _collect(self, call: Call) -> None:
        if not self.is_inlined(call):
            if leaf(call.module) is None:
                self.calls.setdefault(call.path, []).append(call)
            else:
                self.leaves.add(call.path)
        for step in call.steps:
            if isinstance(step, Call):
                self._collect(step)

    def is_inlined(self, call: Call) -> bool:
        """Return whether a call is written where it stands, and is no class of its own."""
        if not call.path:
            return False
        if isinstance(call.module, _CONTAINERS):
            return True
        if not call.results:
            return True
        if call.is_foreign:
            return True
        if leaf(call.module) is not None:
            return any(not name.startswith(call.path + ".") for name in call.state.values())
        if call.state or any(isinstance(step, Call) and step.state for step in call.steps):
            return False
        return call.module.__class__.__module__.startswith("torch.nn") or len(call.steps) <= 6

    def signature(self, call: Call) -> list[str]:
        """Return the arguments of the class of a call: all that its instances are given."""
        kind = type(call.module)
        names: dict[str, None] = {}
        for calls in self.calls.values():
            for each in calls:
                if type(each.module) is kind:
                    names.update(dict.fromkeys(each.given))
        if not call.path:
            inputs = [
                name
                for argument, tree in call.arguments.items()
                for name, leaf_ in named_leaves(argument, tree)
                if isinstance(leaf_, Node)
            ]
            names = dict.fromkeys([*inputs, *names])
        order = list(inspect.signature(kind.forward).parameters)

        def place(name: str) -> tuple[int, str]:
            if name in order:
                return order.index(name), ""
            base, _, index = name.rpartition("_")
            return (order.index(base), index) if base in order else (len(order), name)

        return sorted(names, key=place)

    # -- where things are

    def is_present(self, path: str) -> bool:
        """Return whether the file has a module: it is called, read, or contains one that is."""
        if path in self.calls or path in self.leaves or path in self.read:
            return True
        return any(
            other.startswith(path + ".") for other in (*self.calls, *self.leaves, *self.read)
        )

    def steps_to(self, path: str, owner: str = "") -> list[str]:
        """Return the attributes and indices that lead from one module to another below it."""
        steps: list[str] = []
        here = owner
        rest = path[len(owner) :].lstrip(".")
        for part in rest.split(".") if rest else []:
            parent = self.modules[here]
            if isinstance(parent, (nn.Sequential, nn.ModuleList)):
                if not here:
                    steps.append("layers")
                members = [name for name, _ in parent.named_children()]
                present = [n for n in members if self.is_present(f"{here}.{n}".lstrip("."))]
                steps.append(str(present.index(part)) if part in present else part)
            else:
                steps.append(part)
            here = f"{here}.{part}".lstrip(".")
        return steps

    def attribute(self, owner: str, path: str) -> str:
        """Write the way from `self` to a module."""
        text = "self"
        for step in self.steps_to(path, owner):
            text += f"[{step}]" if step.isdigit() else f".{step}"
        return text

    def tensor(self, owner: str, name: str) -> Written:
        """Write a tensor of the reference, in torch's layout, as it is read in a method."""
        path, _, tensor = name.rpartition(".")
        constant = self.traced.constants.get(name)
        if constant is not None:
            return self._array(constant)
        module = self.modules[path]
        held = leaf(module)
        attribute = self.attribute(owner, path)
        if held is None or (path not in self.leaves and not self._is_made(path)):
            return parsed(f"{attribute}.{tensor}")
        kept = held.tensors[tensor]
        return filled(kept.in_torch, {"self": parsed(f"{attribute}.{kept.name}")})

    def _is_made(self, path: str) -> bool:
        return path not in self.calls and leaf(self.modules[path]) is not None

    def _array(self, value: torch.Tensor) -> Written:
        if value.numel() > _LARGEST_LITERAL:
            raise NotImplementedError(f"a constant of {value.numel()} elements")
        numbers = literal(value.tolist())
        if isinstance(numbers, ast.Tuple):
            numbers = parsed(
                ast.unparse(numbers).replace("(", "[").replace(",)", "]").replace(")", "]")
            )
        return filled(
            "jnp.array(values, dtype)", {"values": numbers, "dtype": literal(value.dtype)}
        )

    # -- classes

    @cached_property
    def classes(self) -> list[Class]:
        """Every class of the file, those that others use first."""
        found: list[Class] = []
        methods = {path: method(calls[0], self.tree) for path, calls in self.calls.items()}
        by_depth = sorted(methods, key=lambda path: (-path.count(".") if path else 1, path))
        kinds: dict[type[nn.Module], list[str]] = {}
        for path in by_depth:
            kinds.setdefault(type(self.modules[path]), []).append(path)
        self.class_of: dict[str, Class] = {}
        # A class comes after those of the modules that its instances contain.
        waiting = dict(kinds)
        while waiting:
            ready = [
                kind
                for kind, paths in waiting.items()
                if not any(
                    other.startswith(f"{path}.") or (not path and other)
                    for path in paths
                    for key, others in waiting.items()
                    if key is not kind
                    for other in others
                )
            ] or [next(iter(waiting))]
            for kind in ready:
                found += self._merged(kind, waiting.pop(kind), methods)
        return found

    def _merged(
        self, kind: type[nn.Module], paths: list[str], methods: Mapping[str, Method]
    ) -> list[Class]:
        groups: dict[str, list[str]] = {}
        inits = {}
        for path in sorted(paths):
            inits[path] = self._init(path)
            groups.setdefault(_shape([*methods[path].body, *inits[path]]), []).append(path)
        made = []
        for index, members in enumerate(groups.values()):
            name = kind.__name__ + ("" if not index else _suffix(members, made))
            first = members[0]
            one = Class(name, members, kind, signature=self.signature(self.calls[first][0]))
            one.always_given = (
                set(one.signature)
                if first == ""
                else set.intersection(
                    *(set(call.given) for path in members for call in self.calls[path])
                )
            )
            bodies = [methods[path].body for path in members]
            self._unify(one, bodies, [inits[path] for path in members])
            one.method = replace(methods[first], body=bodies[0])
            for path in members:
                self.class_of[path] = one
            made.append(one)
        return made

    def _unify(self, one: Class, bodies: list[list[ast.stmt]], inits: list[list[ast.stmt]]) -> None:
        """Make the numbers in which instances differ arguments of `__init__`."""
        modules = [self.modules[path] for path in one.paths]
        by_values: dict[tuple[Any, ...], str] = {}
        attributes: dict[str, Written] = {}

        def named(values: tuple[Any, ...], hint: str) -> str:
            if values not in by_values:
                by_values[values] = self._argument(modules, values, hint, set(one.arguments))
                one.arguments[by_values[values]] = list(values)
            return by_values[values]

        replaced: dict[int, Written] = {}
        for constants in zip(*map(_constants, bodies), strict=True):
            values = tuple(constant.value for constant in constants)
            known = _attribute(modules, values)
            if len(set(values)) > 1:
                name = named(values, "value")
                attributes[name] = ast.Name(name, ast.Load())
            elif isinstance(values[0], float) and known and values[0] not in (0.0, 0.5, 1.0, 2.0):
                name = known
                attributes.setdefault(name, literal(values[0]))
            else:
                continue
            replaced[id(constants[0])] = parsed(f"self.{name}")
        bodies[0] = [_Replaced(replaced).visit(statement) for statement in bodies[0]]
        replaced = {}
        hints = _hints(inits[0])
        for constants in zip(*map(_constants, inits), strict=True):
            values = tuple(constant.value for constant in constants)
            if len(set(values)) > 1:
                hint = hints.get(id(constants[0]), "size")
                replaced[id(constants[0])] = ast.Name(named(values, hint), ast.Load())
        one.init = [_Replaced(replaced).visit(statement) for statement in inits[0]]
        one.init += [
            ast.Assign([parsed(f"self.{name}")], value) for name, value in attributes.items()
        ]

    def _argument(
        self, modules: list[nn.Module], values: tuple[Any, ...], hint: str, taken: set[str]
    ) -> str:
        name = _attribute(modules, values) or hint
        while name in taken:
            name += "_"
        return name

    # -- what __init__ makes

    def _init(self, path: str) -> list[ast.stmt]:
        module = self.modules[path]
        made: list[ast.stmt] = []
        for name, parameter in module.named_parameters(recurse=False):
            if self._is_read(path, name):
                made.append(self._assign(name, f"nnx.Param({_start(parameter)})"))
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            if self._is_read(path, name):
                made.append(self._assign(name, self._buffer(module, name, buffer)))
        if isinstance(module, _CONTAINERS):
            text = self._members(path, module)
            return [self._assign("layers", text)]
        for name, child in module.named_children():
            below = f"{path}.{name}".lstrip(".")
            if self.is_present(below):
                text = self._made(below, child)
                if text is not None:
                    made.append(self._assign(name, text))
        return made

    def _is_read(self, path: str, tensor: str) -> bool:
        return f"{path}.{tensor}".lstrip(".") in self.tensors

    def _assign(self, name: str, text: str) -> ast.stmt:
        return ast.parse(f"self.{name} = {text}").body[0]

    def _buffer(self, module: nn.Module, name: str, value: torch.Tensor) -> str:
        dtype = f"jnp.{DTYPES[value.dtype]}"
        if name not in module._non_persistent_buffers_set:
            return f"Buffer(jnp.zeros({tuple(value.shape)}, {dtype}))"
        return f"Buffer({_values(value)})"

    def _made(self, path: str, module: nn.Module) -> str | None:
        """Write the constructor of a module of the reference."""
        if isinstance(module, _CONTAINERS):
            return self._members(path, module)
        if path in self.calls:
            one = self.class_of[path]
            index = one.paths.index(path)
            options = "".join(f"{n}={v[index]!r}, " for n, v in one.arguments.items())
            return f"{one.name}({options}rngs=rngs)"
        found = leaf(module)
        if found is not None:
            text = found.made(module)
            assert text is not None
            return text[:-1] + ", rngs=rngs)"
        if not self.is_present(path):
            return None
        raise NotImplementedError(
            f"`{path}` ({type(module).__name__}) is never called, and its tensors are read"
        )

    def _members(self, path: str, module: nn.Module) -> str:
        """Write the list, or the dict, of the modules that a container holds."""
        members = []
        for name, child in module.named_children():
            below = f"{path}.{name}".lstrip(".")
            if self.is_present(below) and (text := self._made(below, child)) is not None:
                members.append((name, text))
        texts = [text for _, text in members]
        if isinstance(module, nn.ModuleDict):
            return "nnx.Dict(" + ", ".join(f"{name}={text}" for name, text in members) + ")"
        if len(texts) > 1 and len(set(texts)) == 1:
            return f"nnx.List([{texts[0]} for _ in range({len(texts)})])"
        return f"nnx.List([{', '.join(texts)}])"

    # -- the table of weights

    def rows(self) -> list[transfer.Layout]:
        """Return the rows of the table between the reference's tensors and the file's."""
        rows: dict[str, Any] = {}
        tensors = self.traced.root.module.state_dict(keep_vars=True)
        by_id = {id(tensor): name for name, tensor in tensors.items() if name in self.tensors}
        for name, tensor in tensors.items():
            if name in self.tensors:
                continue
            first = by_id.get(id(tensor))
            rows[name] = (
                transfer.ignored(name, "not used by the outputs")
                if first is None
                else transfer.tied(name, first)
            )
        pairs: dict[str, list[tuple[str, str, Any]]] = {}
        for name in self.tensors:
            path, _, tensor = name.rpartition(".")
            if name not in tensors:
                continue
            held = None if path in self.calls else leaf(self.modules[path])
            here = ".".join(self.steps_to(path))
            kept = held.tensors[tensor] if held is not None else None
            target = f"{here}.{kept.name if kept else tensor}".lstrip(".")
            steps = (kept.step,) if kept is not None and kept.step is not None else ()
            pairs.setdefault(_blank(name), []).append((name, target, steps))
        for group in pairs.values():
            patterns = {_pattern(name, target): steps for name, target, steps in group}
            if len(patterns) == 1 and len(group) > 1:
                (((key, target), steps),) = patterns.items()
                rows[key] = transfer.row(key, target, *steps)
            else:
                rows |= {name: transfer.row(name, target, *steps) for name, target, steps in group}
        return list(rows.values())


def _blank(name: str) -> str:
    """Return a name without its integers."""
    return ".".join("" if part.isdigit() else part for part in name.split("."))


def _pattern(key: str, path: str) -> tuple[str, str]:
    """Write the integers that a key and a path share as names in braces."""
    theirs, ours = key.split("."), path.split(".")
    if [part for part in theirs if part.isdigit()] != [part for part in ours if part.isdigit()]:
        return key, path

    def filled(parts: list[str]) -> str:
        names = iter(("{layer}", "{part}", "{piece}", "{item}", "{member}"))
        return ".".join(next(names) if part.isdigit() else part for part in parts)

    return filled(theirs), filled(ours)


def _suffix(members: list[str], made: list[Class]) -> str:
    """Name a second class of one of torch's by the first part of its path that the others lack."""
    others = {part for one in made for path in one.paths for part in path.split(".")}
    for part in members[0].split("."):
        if part not in others and not part.isdigit():
            return "In" + "".join(word.capitalize() for word in part.split("_"))
    return "Other" * len(made)


def _attribute(modules: Sequence[nn.Module], values: Sequence[Any]) -> str | None:
    """Return the attribute of torch's modules that has these values, if exactly that is so."""
    for name, value in vars(modules[0]).items():
        if name.startswith("_") or isinstance(value, bool) or type(value) is not type(values[0]):
            continue
        if all(
            getattr(module, name, None) == expected
            for module, expected in zip(modules, values, strict=True)
        ):
            return name
    return None


def _hints(statements: Sequence[ast.stmt]) -> dict[int, str]:
    """Name the constants of constructors by the attribute and the keyword that they stand at."""
    found: dict[int, str] = {}
    for statement in statements:
        for node in ast.walk(statement):
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                for each in ast.walk(keyword.value):
                    found.setdefault(id(each), keyword.arg or "size")
    for statement in statements:
        assert isinstance(statement, ast.Assign)
        target = ast.unparse(statement.targets[0]).removeprefix("self.")
        for each in ast.walk(statement.value):
            found.setdefault(id(each), f"{target}_size")
    return found


def _start(value: torch.Tensor) -> str:
    """Write what a parameter is before weights are loaded: torch's constant, or drawn."""
    shape = tuple(value.shape)
    flat = value.detach().reshape(-1)
    if flat.numel() and bool((flat == flat[0]).all()) and float(flat[0]) in (0.0, 1.0):
        return f"jnp.{'ones' if flat[0] == 1 else 'zeros'}({shape})"
    deviation = float(f"{float(flat.float().std()) if flat.numel() > 1 else 1.0:.1g}")
    return f"{deviation} * jax.random.normal(rngs.params(), {shape})"


def _values(value: torch.Tensor) -> str:
    """Write the values of a buffer that no file of weights holds."""
    dtype = f"jnp.{DTYPES[value.dtype]}"
    shape = tuple(value.shape)
    flat = value.detach().reshape(-1)
    if flat.numel() and bool((flat == flat[0]).all()):
        return f"jnp.full({shape}, {flat[0].item()!r}, {dtype})"
    if value.numel() > 1 and torch.equal(flat, torch.arange(flat.numel()).to(flat.dtype)):
        count = f"jnp.arange({flat.numel()}, dtype={dtype})"
        return count if len(shape) == 1 else f"{count}.reshape({shape})"
    if flat.numel() > _LARGEST_LITERAL:
        raise NotImplementedError(f"a buffer of {flat.numel()} elements that no file holds")
    numbers = np.asarray(flat.float().numpy() if flat.is_floating_point() else flat.numpy())
    text = f"jnp.array({numbers.tolist()!r}, {dtype})"
    return text if len(shape) == 1 else f"{text}.reshape({shape})"


def walk(call: Call) -> Iterator[Call]:
    """Iterate over a call and all calls below it."""
    yield call
    for step in call.steps:
        if isinstance(step, Call):
            yield from walk(step)
