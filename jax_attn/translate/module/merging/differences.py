"""Tell the uses of a class apart, by the names of torch's own source."""

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from jax_attn.translate.module.merging.merger import Condition
from jax_attn.translate.rules.written import TAKEN
from jax_attn.translate.tracing.calls import ModuleCall


@dataclass(frozen=True)
class Use:
    """Hold one use of a class: a call of an instance, or an instance that is never called."""

    path: str
    call: ModuleCall | None = None
    is_training: bool = False


@dataclass(frozen=True)
class Flag:
    """Hold what an attribute of the torch modules says, as a condition on it.

    Attributes:
      name: the attribute.
      values: its value in each instance, by path.
      template: the condition, with `{}` for the attribute, and its negation.
    """

    name: str
    values: Mapping[str, Any]
    template: str
    negation: str

    def holds(self, uses: Sequence[Use]) -> frozenset[int]:
        return frozenset(
            index
            for index, use in enumerate(uses)
            if eval(self.template.format("value"), {"value": self.values[use.path]})
        )

    def condition(self, uses: Sequence[Use], rank: tuple[int, ...], owner: str = "") -> Condition:
        """Write the condition where the attribute is read: in a method its owner is `self.`."""
        text = owner + self.name
        return Condition(
            self.holds(uses), self.template.format(text), self.negation.format(text), rank
        )


def _words(kind: type) -> list[str]:
    """Return the words of a class's source, in order."""
    try:
        return re.findall(r"\w+", inspect.getsource(kind))
    except (OSError, TypeError):
        return []


def _place(words: Sequence[str], name: str) -> int:
    return words.index(name) if name in words else len(words)


def flags(
    modules: Mapping[str, nn.Module], kind: type[nn.Module]
) -> list[tuple[Flag, tuple[int, ...]]]:
    """Return the attributes that differ between instances, each with its rank.

    Those that the class's source names come first, and of these booleans.
    """
    words = _words(kind)
    found: list[tuple[Flag, tuple[int, ...]]] = []
    for name in _attributes(modules):
        values = {path: _value(module, name) for path, module in modules.items()}
        distinct = {repr(value) for value in values.values()}
        if len(distinct) < 2 or not all(map(_is_plain, values.values())):
            continue
        kinds = {type(value) for value in values.values()}
        place = _place(words, name)
        rank = (int(kinds != {bool}), place) if place < len(words) else (3, place)
        if kinds == {bool}:
            found.append((Flag(name, values, "{}", "not {}"), rank))
        elif type(None) in kinds:
            found.append((Flag(name, values, "{} is not None", "{} is None"), rank))
        elif kinds <= {int, float} and min(values.values()) == 0:
            found.append((Flag(name, values, "{} > 0", "{} == 0"), rank))
        elif kinds == {str}:
            for value in sorted(set(values.values())):
                found.append((Flag(name, values, f"{{}} == {value!r}", f"{{}} != {value!r}"), rank))
    return found


def _attributes(modules: Mapping[str, nn.Module]) -> list[str]:
    names: dict[str, None] = {}
    for module in modules.values():
        names |= dict.fromkeys(name for name in vars(module) if not name.startswith("_"))
        config = vars(module).get("config")
        names |= dict.fromkeys(
            name
            for name, value in (vars(config) if hasattr(config, "__dict__") else {}).items()
            if isinstance(value, bool) and not name.startswith("_")
        )
    others = {"training", "layer_idx", *UNFIT, *members_of(modules.values())}
    return [name for name in names if name not in others]


UNFIT = {*TAKEN, "rngs", "range"}
"""Names that mean something else where `__init__` takes its arguments."""


def members_of(modules: Iterable[nn.Module]) -> set[str]:
    """Return the names of what modules hold: parameters, buffers and modules."""
    return {
        name
        for module in modules
        for table in (module._parameters, module._buffers, module._modules)
        for name in table
    }


def _value(module: nn.Module, name: str) -> Any:
    if name in vars(module):
        return vars(module)[name]
    return getattr(vars(module).get("config"), name, None)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def argument_conditions(uses: Sequence[Use], signature: Sequence[str]) -> list[Condition]:
    """Return which arguments only some calls are given."""
    found: list[Condition] = []
    for name in signature:
        given = frozenset(
            index for index, use in enumerate(uses) if use.call and name in use.call.given
        )
        if given and len(given) < len(uses):
            text, negation = f"{name} is not None", f"{name} is None"
            found.append(Condition(given, text, negation, (1, 0), name))
    return found


def mode_conditions(uses: Sequence[Use]) -> list[Condition]:
    """Return the condition of eval mode, if there are calls in both modes."""
    holds = frozenset(index for index, use in enumerate(uses) if not use.is_training)
    return [Condition(holds, MODE, f"not {MODE}", (-1,))] if 0 < len(holds) < len(uses) else []


MODE = "self.deterministic"
"""What `train()` and `eval()` of NNX set, as they do in `nnx.Dropout`."""


def choice_conditions(
    uses: Sequence[Use], choices: Callable[[ModuleCall], Mapping[str, Any]]
) -> list[Condition]:
    """Return what calls of one module pass that is no tensor, one condition a value."""
    found: dict[tuple[str, str], set[int]] = {}
    for index, use in enumerate(uses):
        for name, value in (choices(use.call) if use.call else {}).items():
            found.setdefault((name, repr(value)), set()).add(index)
    return [
        Condition(
            frozenset(holds),
            f"{name} {'is' if value in _ALONE else '=='} {value}",
            f"{name} {'is not' if value in _ALONE else '!='} {value}",
            (0, 0),
            name,
        )
        for (name, value), holds in found.items()
        if len(holds) < len(uses)
    ]


_ALONE = ("None", "True", "False")


def member_conditions(
    uses: Sequence[Use], inits: Mapping[str, Mapping[str, ast.stmt]]
) -> list[Condition]:
    """Return which parameters and children only some instances have."""
    found: list[Condition] = []
    for name in {name: None for members in inits.values() for name in members}:
        having = frozenset(index for index, use in enumerate(uses) if name in inits[use.path])
        if len(having) < len(uses):
            text = f"self.{name}"
            found.append(Condition(having, f"{text} is not None", f"{text} is None", (1, 1)))
    return found


class Conditions:
    """Collect the conditions of a class, with the flags that some of them are.

    Args:
      uses: the uses of the class.
      owner: what an attribute is read from, `self.` in a method.
    """

    def __init__(self, uses: Sequence[Use], owner: str = "") -> None:
        self.uses = uses
        self.owner = owner
        self.flags: dict[str, Flag] = {}
        self.known: list[Condition] = []
        self.new: list[Condition] = []

    def add(self, flag: Flag, rank: tuple[int, ...]) -> Condition:
        """Take a flag for a condition."""
        condition = flag.condition(self.uses, rank, self.owner)
        self.flags[condition.text] = flag
        self.known.append(condition)
        return condition

    def made(self, holds: frozenset[int], others: frozenset[int], name: str) -> Condition | None:
        """Make a flag for uses that do what others do not, unless one module is on both sides."""
        for condition in self.new:
            sides = holds & condition.holds, others & condition.holds
            if sides in ((holds, frozenset()), (frozenset(), others)):
                return condition
        true = {self.uses[index].path for index in holds}
        if true & {self.uses[index].path for index in others}:
            return None
        while self.owner + name in self.flags:
            name += "_"
        values = {use.path: use.path in true for use in self.uses}
        flag = Flag(name, values, "{}", "not {}")
        condition = self.add(flag, (9,))
        self.known.remove(condition)
        self.new.append(condition)
        return condition


def identities(modules: Mapping[str, nn.Module]) -> list[Flag]:
    """Return the children that only some instances have, where others have an `nn.Identity`."""
    found: list[Flag] = []
    taken = {*_attributes(modules), *members_of(modules.values())}
    for name in {name: None for module in modules.values() for name in module._modules}:
        values = {
            path: not isinstance(module._modules.get(name), nn.Identity)
            for path, module in modules.items()
        }
        is_everywhere = all(module._modules.get(name) is not None for module in modules.values())
        if is_everywhere and len(set(values.values())) > 1:
            flag = f"has_{name}"
            while flag in taken:
                flag += "_"
            found.append(Flag(flag, values, "{}", "not {}"))
    return found


def first_name(statements: Sequence[ast.stmt]) -> str:
    """Return the first name that statements assign."""
    names = [
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id != "_"
    ]
    return names[0] if names else "more"
