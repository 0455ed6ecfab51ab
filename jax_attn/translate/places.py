"""Where the modules and the tensors of a reference are in the file."""

import ast
import inspect

import torch
from torch import nn
from torch.fx import Node

from jax_attn.translate.calls import Call, Traced
from jax_attn.translate.expression import Written, filled, literal, parsed
from jax_attn.translate.leaves import leaf
from jax_attn.translate.marks import named_leaves
from jax_attn.translate.scope import Tree

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
LARGEST_LITERAL = 128


class Places:
    """Where the modules and tensors of a traced reference are in the file."""

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
        if isinstance(call.module, CONTAINERS):
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
        if value.numel() > LARGEST_LITERAL:
            raise NotImplementedError(f"a constant of {value.numel()} elements")
        numbers = literal(value.tolist())
        if isinstance(numbers, ast.Tuple):
            numbers = parsed(
                ast.unparse(numbers).replace("(", "[").replace(",)", "]").replace(")", "]")
            )
        return filled(
            "jnp.array(values, dtype)", {"values": numbers, "dtype": literal(value.dtype)}
        )
