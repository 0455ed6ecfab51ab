"""Say where the modules and the tensors of a reference are in the file."""

import ast
from collections.abc import Sequence
from itertools import chain, count
from typing import Any

import numpy as np
from torch import nn
from torch.fx import Node

from jax_attn.transfer import as_numpy
from jax_attn.translate.module.methods.axes import Place, axis_names
from jax_attn.translate.module.methods.leaves import KnownLayer, leaf
from jax_attn.translate.module.methods.scope import MethodContext
from jax_attn.translate.module.places.arrays import (
    KeptConstants,
    array_text,
    as_array,
    held_tensor,
    is_large,
)
from jax_attn.translate.module.places.class_calls import (
    choice,
    choices,
    ordered,
    outputs,
    position,
    returned_places,
    taken_by_file,
    unfit_arguments,
)
from jax_attn.translate.module.places.containers import (
    CONTAINERS,
    DICTS,
    LISTS,
    attribute_name,
    has_own_class,
)
from jax_attn.translate.module.places.functions import Functions
from jax_attn.translate.rules.expression import Written, filled, literal, parsed
from jax_attn.translate.rules.written import TAKEN
from jax_attn.translate.tracing.calls import ModuleCall, steps
from jax_attn.translate.tracing.traced import TracedModule
from jax_attn.translate.tracing.training import changing


class FilePlaces:
    """Say where the modules and tensors of a traced reference are in the file."""

    def __init__(self, traced: TracedModule, trained: TracedModule | None = None) -> None:
        """Take a trace in eval mode, and one in training mode if that is written too."""
        traces = [traced] if trained is None else [traced, trained]
        self.reference = traced.root.module
        self.modules = dict(self.reference.named_modules())
        self.constants = KeptConstants(traces)
        self.training: set[ModuleCall] = set()
        self.changing = changing(traced.root, trained.root) if trained else frozenset()
        self.calls: dict[str, list[ModuleCall]] = {}
        self.leaves: set[str] = set()
        self.functions = Functions([one.root for one in traces])
        for one in traces:
            self._collect(one.root, one.is_training)
        self.dropouts: dict[str, dict[str, float]] = {}
        self.tensors = list(dict.fromkeys(chain(*(one.root.state.values() for one in traces))))
        self.read = {name.rpartition(".")[0] for name in self.tensors}
        self.problems = unfit_arguments(traced.root)
        self.returns = {
            kind: returned_places(self.calls_of(kind))
            for kind in {type(calls[0].module) for calls in self.calls.values()}
        }
        self.choices_of = choices(self.calls)
        self.axis_names_of: dict[type[nn.Module], dict[Place, str]] = {}
        self.taken = set(TAKEN)
        self.trees = {one.is_training: self._tree(one) for one in traces}
        self.functions.write(self.context, self.taken)

    def context(self, call: ModuleCall) -> MethodContext:
        """Return what a method of a call reads."""
        return self.trees[call in self.training]

    def _tree(self, traced: TracedModule) -> MethodContext:
        return MethodContext(
            sizes=traced.sizes,
            state=traced.state,
            is_training=traced.is_training,
            signatures=self.signature,
            axis_names=self.axis_names,
            choices=self.choices,
            outputs=self.outputs,
            position=self.position,
            is_inlined=self.is_inlined,
            attribute=self.attribute,
            members=self.part_of_list,
            tensor=self.tensor,
            dropout=self.dropout,
            returned=traced.returned,
            problems=self.problems,
            functions=self._function,
            taken=self.taken,
        )

    def _collect(self, call: ModuleCall, is_training: bool) -> None:
        if is_training:
            self.training.add(call)
        if call.function is None and not self.is_inlined(call):
            if leaf(call.module) is None:
                self.calls.setdefault(call.path, []).append(call)
            else:
                self.leaves.add(call.path)
        for step in call.steps:
            if isinstance(step, ModuleCall):
                self._collect(step, is_training)

    def is_inlined(self, call: ModuleCall) -> bool:
        """Return whether a call is written where it stands, and is no class of its own."""
        if call.function is not None:
            return id(call) not in self.functions.of_call
        if not call.path:
            return False
        if self.is_container(call.path):
            return True
        if not call.results:
            return True
        if call.is_foreign:
            return True
        if call.path in self.changing and leaf(call.module) is None:
            return False
        if leaf(call.module) is not None:
            return any(not name.startswith(call.path + ".") for name in call.state.values())
        inside = list(steps(call))
        if call.state or any(isinstance(step, ModuleCall) and step.state for step in inside):
            return False
        return call.module.__class__.__module__.startswith("torch.nn") or len(inside) <= 6

    def _function(self, call: ModuleCall) -> tuple[str, Sequence[str]]:
        found = self.functions.of_call[id(call)]
        return found.name, found.parameters

    def signature(self, call: ModuleCall) -> list[str]:
        """Return the arguments of the class of a call: all that its instances are given."""
        kind = type(call.module)
        names: dict[str, None] = dict.fromkeys(self.choices(call))
        for each in self.calls_of(kind):
            names.update(dict.fromkeys(each.given))
        if not call.path:
            return taken_by_file(call)
        return ordered(names, kind.forward)

    def axis_names(self, call: ModuleCall) -> dict[Place, str]:
        """Return the variables of sizes that differ between the calls of a class."""
        kind = type(call.module)
        if kind not in self.axis_names_of:
            self.axis_names_of[kind] = axis_names(
                self.calls_of(kind), lambda call: self.context(call).sizes
            )
        return self.axis_names_of[kind]

    def calls_of(self, kind: type[nn.Module]) -> list[ModuleCall]:
        """Return the calls of the modules of a class."""
        every = chain.from_iterable(self.calls.values())
        return [call for call in every if type(call.module) is kind]

    def choices(self, call: ModuleCall) -> dict[str, Any]:
        """Return what a call passes that is no tensor and tells calls of one module apart."""
        return {name: choice(call, name) for name in self.choices_of.get(type(call.module), ())}

    def outputs(self, call: ModuleCall) -> list[Node | None]:
        """Return the values that a call returns: in each place that a call of its class does."""
        if call.function is not None:
            return outputs(call, self.functions.returns[call.function])
        if not call.path or call.path in self.leaves or self.is_inlined(call):
            return list(call.results)
        return outputs(call, self.returns[type(call.module)])

    def position(self, call: ModuleCall, place: int) -> int | None:
        """Return which element of what torch's forward returns an output is, if it is one."""
        if call.function is not None:
            return position(call, place, self.functions.returns[call.function])
        return position(call, place, self.returns.get(type(call.module)))

    def holders(self) -> list[str]:
        """Return the modules without a method, which only hold tensors or modules of others."""
        return [
            path
            for path, module in sorted(self.modules.items())
            if path not in self.calls
            and self.is_present(path)
            and self.leaf_at(path) is None
            and not self.is_container(path)
        ]

    # -- where things are

    def is_container(self, path: str) -> bool:
        """Return whether a module is a list or a dict in the file, and no class of its own."""
        module = self.modules[path]
        return bool(path) and isinstance(module, CONTAINERS) and not has_own_class(module)

    def is_present(self, path: str) -> bool:
        """Return whether the file has a module: it is called, read, or contains one that is."""
        if path in self.calls or path in self.leaves or path in self.read:
            return True
        return any(
            other.startswith(path + ".") for other in (*self.calls, *self.leaves, *self.read)
        )

    def steps_to(self, path: str, owner: str = "") -> list[str]:
        """Return the names and indices that lead from one module to another below it."""
        return [step for step, _ in self._way(path, owner)]

    def _way(self, path: str, owner: str) -> list[tuple[str, str]]:
        """Return the steps from one module to another, each with its text in Python."""
        steps: list[tuple[str, str]] = []
        here = owner
        rest = path[len(owner) :].lstrip(".")
        for part in rest.split(".") if rest else []:
            parent = self.modules[here]
            if isinstance(parent, CONTAINERS) and not self.is_container(here):
                steps.append(("layers", ".layers"))
            if isinstance(parent, LISTS):
                index = str(self.members(here).index(part))
                steps.append((index, f"[{index}]"))
            elif isinstance(parent, DICTS):
                steps.append((part, f"[{part!r}]"))
            else:
                name = attribute_name(parent, part)
                steps.append((name, f".{name}"))
            here = f"{here}.{part}".lstrip(".")
        return steps

    def members(self, path: str) -> list[str]:
        """Return the names of what a container of the file holds, modules or parameters."""
        module = self.modules[path]
        names = [*(module._parameters if self.is_container(path) else ()), *module._modules]
        return [name for name in names if self._is_member(f"{path}.{name}".lstrip("."))]

    def _is_member(self, path: str) -> bool:
        return path in self.tensors or (path in self.modules and self.is_present(path))

    def attribute(self, owner: str, path: str) -> str:
        """Write the way from `self` to a module."""
        return "self" + "".join(text for _, text in self._way(path, owner))

    def part_of_list(self, owner: str, paths: Sequence[str]) -> Written:
        """Write the list that holds modules, or the part of it that holds no others."""
        parent = paths[0].rpartition(".")[0]
        whole = parsed(self.attribute(owner, paths[0]).rpartition("[")[0])
        every = self.members(parent)
        first, last = (every.index(path.rpartition(".")[2]) for path in (paths[0], paths[-1]))
        if (first, last) == (0, len(every) - 1):
            return whole
        lower = literal(first) if first else None
        upper = literal(last + 1) if last + 1 < len(every) else None
        return ast.Subscript(whole, ast.Slice(lower, upper), ast.Load())

    def tensor(self, owner: str, name: str) -> Written:
        """Write a tensor of the reference, in torch's layout, as it is read in a method."""
        path, _, tensor = name.rpartition(".")
        constant = self.constants.value(name)
        if constant is not None:
            if owner not in self.modules or not is_large(constant):
                return parsed(array_text(constant))
            large = self.constants.attribute(owner, name, self._members(owner))
            return parsed(f"self.{large}[...]")
        module = self.modules[path]
        attribute = parsed(self.attribute(owner, path))
        held = self.leaf_at(path)
        if held is not None:
            kept = held.tensors[tensor]
            whole = ast.Attribute(attribute, kept.name, ast.Load())
            return filled(kept.in_torch, {"self": as_array(whole)})
        if isinstance(module, nn.ParameterList):
            index = literal(self.members(path).index(tensor))
            return as_array(ast.Subscript(attribute, index, ast.Load()))
        if isinstance(module, nn.ParameterDict):
            return as_array(ast.Subscript(attribute, literal(tensor), ast.Load()))
        return as_array(ast.Attribute(attribute, attribute_name(module, tensor), ast.Load()))

    def _members(self, path: str) -> set[str]:
        """Return the names of what a module of the file has: tensors and modules."""
        module = self.modules[path]
        below = {name for name in module._modules if self.is_present(f"{path}.{name}".lstrip("."))}
        return {*module._parameters, *module._buffers, *below}

    def leaf_at(self, path: str) -> KnownLayer | None:
        """Return how NNX has the module of a path, if the file does not write it as a class."""
        module = self.modules[path]
        if path in self.calls:
            return None
        # One that is never called as a layer may only hold a bias, as its weight is another's.
        names = (f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False))
        is_whole = path in self.leaves or all(name in self.tensors for name in names)
        return leaf(module) if is_whole else None

    def dropout(self, path: str, rate: float) -> str:
        """Return the attribute of a module of the file that drops at a rate, made if need be."""
        made = self.dropouts.setdefault(path, {})
        taken = {*made, *vars(self.modules[path]), *self._members(path)}
        names = chain(("dropout", "drop"), (f"dropout_{number}" for number in count(2)))
        known = next((name for name, kept in made.items() if kept == rate), None)
        name = known or next(name for name in names if name not in taken)
        made[name] = rate
        return name

    def target(self, name: str) -> str:
        """Return the path of a tensor of the reference in the file's module."""
        path, _, tensor = name.rpartition(".")
        held = self.leaf_at(path)
        if held is not None:
            tensor = held.tensors[tensor].name
        elif isinstance(self.modules[path], nn.ParameterList):
            tensor = str(self.members(path).index(tensor))
        elif not isinstance(self.modules[path], nn.ParameterDict):
            tensor = attribute_name(self.modules[path], tensor)
        return ".".join([*self.steps_to(path), tensor])

    def tables(self) -> dict[str, np.ndarray]:
        """Return the buffers that are saved with the weights as no state dict holds them.

        Large constants are among them, such as what the reference keeps from an earlier call.
        """
        constants = {
            ".".join([*self.steps_to(owner), kept]): as_numpy(self.constants.values[name])
            for owner, names in self.constants.attributes.items()
            for name, kept in names.items()
        }
        named = chain(self.reference.named_parameters(), self.reference.named_buffers())
        return constants | {
            self.target(name): as_numpy(tensor)
            for name, tensor in named
            if name in self.tensors and self.is_table(name)
        }

    def is_carried(self, name: str) -> bool:
        """Return whether a tensor crosses by the table.

        Integers are written in the source: JAX holds them in other dtypes.
        """
        path, _, tensor = name.rpartition(".")
        module = self.modules[path]
        is_saved = tensor not in module._non_persistent_buffers_set
        value = held_tensor(module, tensor)
        return is_saved and (value.is_floating_point() or value.is_complex())

    def is_table(self, name: str) -> bool:
        """Return whether a tensor is not in the table and too large to be written."""
        path, _, tensor = name.rpartition(".")
        return is_large(held_tensor(self.modules[path], tensor)) and not self.is_carried(name)
