"""Contents of a `torch.optim` state dict, parameter by parameter; imports no framework."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax_attn.transfer.problems import Problem

# An option that marks an algorithm, the option that makes it keep a state, and that state's names.
_KEPT = (
    ("amsgrad", "betas", ("step", "exp_avg", "exp_avg_sq")),
    ("dampening", "momentum", ("momentum_buffer",)),
)

_NO_EQUAL = {
    "amsgrad": "torch keeps the largest of the uncorrected second moments, optax of the corrected",
    "dampening": "optax's trace adds each gradient whole",
    "maximize": "torch's moments are those of the negated gradients",
}

Names = Iterable[str] | Iterable[Iterable[str]]
"""Names of parameters in an optimizer's order, or one list for each of its groups."""

COUNTABLE = 2**31
"""Limit of optax's counts, which are int32."""


class Parameter(NamedTuple):
    """A parameter in `torch.optim`: its id, its name and the names of its state."""

    id: Any
    key: str
    kept: tuple[str, ...]


def parameters(torch_state: Any, names: Names | None, problems: list[Problem]) -> list[Parameter]:
    """Return the named parameters of a state dict; add a problem for each option that optax lacks.

    names: as for `load_optimizer`. Raises TypeError for anything but a state dict and names.
    """
    if not (isinstance(torch_state, Mapping) and {"state", "param_groups"} <= torch_state.keys()):
        hint = ": pass its state_dict()" if hasattr(torch_state, "state_dict") else ""
        kind = type(torch_state).__name__
        raise TypeError(f"torch_state: expected a torch.optim state dict, got {kind}{hint}")
    groups = torch_state["param_groups"]
    problems += [problem for i, group in enumerate(groups) for problem in _refused(i, group)]
    named, wrong = names_by_group(groups, names)
    keys = [] if wrong else [key for keys in named for key in keys]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        text = f"expected each name once, got {twice} several times"
        wrong = [Problem("ambiguous", "names", text)]
    problems += wrong
    return (
        []
        if wrong
        else [
            Parameter(id, key, _kept(group))
            for group, keys in zip(groups, named, strict=True)
            for id, key in zip(group["params"], keys, strict=True)
        ]
    )


def moments(
    state: Mapping[Any, Mapping[str, Any]], known: Sequence[Parameter], problems: list[Problem]
) -> tuple[dict[str, dict[str, Any]], dict[int, str]]:
    """Return {"exp_avg": {key: tensor}, …}, and each step with the first key that has it.

    state: a state dict's "state", of torch or NumPy tensors. Problems are added to `problems`.
    """
    tensors: dict[str, dict[str, Any]] = {}
    steps: dict[int, str] = {}
    strays: dict[str, list[str]] = {}
    ids = {parameter.id for parameter in known}
    problems += [
        Problem("unexpected", f"state[{id!r}]", "expected an id of the param_groups")
        for id in state
        if id not in ids
    ]
    for id, key, kept in known:
        held = {name: value for name, value in state.get(id, {}).items() if value is not None}
        if held and "step" in kept and "step" not in held:
            problems.append(Problem("missing", f"step of {key}", f"got only {', '.join(held)}"))
        for name, value in held.items():
            if name not in kept:
                strays.setdefault(name, []).append(key)
            elif name != "step":
                tensors.setdefault(name, {})[key] = value
            elif (step := _count(value)) is not None:
                steps.setdefault(step, key)
            else:
                text = f"expected a whole number below 2³¹, got {value}"
                problems.append(Problem("unreadable", f"step of {key}", text))
    for name, keys in strays.items():
        text = f"optax has no counterpart for this state of {len(keys)} parameters, {keys[0]} first"
        problems.append(Problem("unexpected", name, text))
    return tensors, steps


def names_by_group(
    groups: Sequence[Mapping[str, Any]], names: Names | None
) -> tuple[list[list[str]], list[Problem]]:
    """Return a list of names for each group, and the problems."""
    recorded = [list(group.get("param_names") or ()) for group in groups]
    if names is None:
        if all(recorded):
            return recorded, []
        text = "expected the parameters' names, because the state dict has no param_names"
        hint = "names=[name for name, _ in torch_module.named_parameters()], group by group"
        return [], [Problem("missing", "names", text, hint)]
    lists: list[Any] = list(names)
    if all(isinstance(name, str) for name in lists):
        if len(groups) != 1:
            # Ids are numbered across groups: a flat list in the wrong order would often fit.
            text = f"expected a list of names for each of the {len(groups)} groups, got one list"
            return [], [Problem("ambiguous", "names", text)]
        lists = [lists]
    lists = [list(keys) for keys in lists]
    if others := [key for keys in lists for key in keys if not isinstance(key, str)]:
        raise TypeError(f"names: expected strings, got {type(others[0]).__name__}")
    expected, got = [len(group["params"]) for group in groups], [len(keys) for keys in lists]
    if got != expected:
        return [], [Problem("missing", "names", f"expected {expected} by group, got {got}")]
    problems = [
        Problem("ambiguous", "names", f"param_groups[{i}] names its parameters {own}, got {keys}")
        for i, (own, keys) in enumerate(zip(recorded, lists, strict=True))
        if own and own != keys
    ]
    return lists, problems


def _refused(i: int, group: Mapping[str, Any]) -> list[Problem]:
    problems = [
        Problem("refused", f"param_groups[{i}].{option}", f"got {group[option]}: {why}")
        for option, why in _NO_EQUAL.items()
        if group.get(option)
    ]
    if not any(mark in group for mark, _, _ in _KEPT):
        options = ", ".join(option for option in group if option != "params")
        text = f"expected options of Adam, AdamW or SGD, got {options}"
        problems.append(Problem("refused", f"param_groups[{i}]", text))
    return problems


def _kept(group: Mapping[str, Any]) -> tuple[str, ...]:
    return next((kept for mark, set_, kept in _KEPT if mark in group and group.get(set_)), ())


def _count(step: Any) -> int | None:
    """Return a step as an int, or None; torch keeps a tensor, formerly an int."""
    try:
        number = float(step)
        return int(number) if 0 <= number < COUNTABLE and number == int(number) else None
    except (TypeError, ValueError, OverflowError):
        return None
