"""What a `torch.optim` state dict holds, parameter by parameter; imports no framework."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_attn.transfer.problems import Problem

_KEPT = (  # an option that only these algorithms have, one that is set where they keep, and what
    ("amsgrad", "betas", ("step", "exp_avg", "exp_avg_sq")),
    ("dampening", "momentum", ("momentum_buffer",)),
)

_NO_EQUAL = {
    "amsgrad": "torch keeps the largest of the uncorrected second moments, optax of the corrected",
    "dampening": "optax's trace adds each gradient whole",
    "maximize": "torch's moments are those of the negated gradients",
}

COUNTABLE = 2**31
"""What optax's counts stay below."""


class Parameter(NamedTuple):
    """What `torch.optim` knows of one parameter: its id, its name and what is kept for it."""

    id: Any
    key: str
    kept: tuple[str, ...]


def parameters(torch_state: Any, names: Any) -> tuple[list[Parameter], list[Problem]]:
    """The parameters of a state dict under their names, and what optax has no equal of.

    names: as for `load_optimizer`. Raises TypeError for what is no state dict or no name.
    """
    if not (isinstance(torch_state, Mapping) and {"state", "param_groups"} <= torch_state.keys()):
        hint = ": hand in its state_dict()" if hasattr(torch_state, "state_dict") else ""
        kind = type(torch_state).__name__
        raise TypeError(f"torch_state: expected a torch.optim state dict, got {kind}{hint}")
    groups = torch_state["param_groups"]
    problems = [problem for i, group in enumerate(groups) for problem in _refused(i, group)]
    named, wrong = names_by_group(groups, names)
    if wrong:
        return [], problems + wrong
    keys = [key for keys in named for key in keys]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        text = f"expected each name once, got several times {twice}"
        return [], [*problems, Problem("ambiguous", "names", text)]
    found = [
        Parameter(id, key, _kept(group))
        for group, keys in zip(groups, named, strict=True)
        for id, key in zip(group["params"], keys, strict=True)
    ]
    return found, problems


def moments(
    state: Mapping[Any, Mapping[str, Any]], known: Sequence[Parameter]
) -> tuple[dict[str, dict[str, Any]], dict[int, str], list[Problem]]:
    """{"exp_avg": {key: tensor}, …}, each step and the first key that has it, and what is wrong.

    state: a state dict's "state", of torch or NumPy tensors.
    """
    tensors: dict[str, dict[str, Any]] = {}
    steps: dict[int, str] = {}
    strays: dict[str, list[str]] = {}
    ids = {parameter.id for parameter in known}
    problems = [
        Problem("unexpected", f"state[{id!r}]", "expected an id of the param_groups")
        for id in state
        if id not in ids
    ]
    for id, key, kept in known:
        held = {name: value for name, value in state.get(id, {}).items() if value is not None}
        if held and "step" in kept and "step" not in held:
            problems.append(Problem("missing", f"step of {key}", f"got {', '.join(held)} alone"))
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
        text = f"optax has no equal of what torch keeps for {len(keys)} parameters, {keys[0]} first"
        problems.append(Problem("unexpected", name, text))
    return tensors, steps, problems


def as_torch(array: np.ndarray) -> Any:
    """`array` as a torch tensor that shares its memory; as it is where torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return array
    if array.dtype.name == "bfloat16":  # which torch does not take from NumPy
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def names_by_group(
    groups: Sequence[Mapping[str, Any]], names: Iterable[Any] | None
) -> tuple[list[list[str]], list[Problem]]:
    """A list of names for each group."""
    written = [group.get("param_names") for group in groups]
    if names is None:
        if all(written):
            return written, []
        text = "expected the parameters' names, and the state dict has no param_names"
        hint = "names=[name for name, _ in torch_module.named_parameters()], group by group"
        return [], [Problem("missing", "names", text, hint)]
    given = list(names)
    if all(isinstance(name, str) for name in given):
        if len(groups) != 1:
            # Ids count through the groups: a flat list in another order would often fit.
            text = f"expected a list of names for each of the {len(groups)} groups, got one list"
            return [], [Problem("ambiguous", "names", text)]
        given = [given]
    given = [list(keys) for keys in given]
    if strangers := [key for keys in given for key in keys if not isinstance(key, str)]:
        raise TypeError(f"names: expected strings, got {type(strangers[0]).__name__}")
    expected, got = [len(group["params"]) for group in groups], [len(keys) for keys in given]
    if got != expected:
        return [], [Problem("missing", "names", f"expected {expected} by group, got {got}")]
    problems = [
        Problem("ambiguous", "names", f"param_groups[{i}] names its parameters {have}, got {keys}")
        for i, (have, keys) in enumerate(zip(written, given, strict=True))
        if have and list(have) != keys
    ]
    return given, problems


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
    """A step as an int: torch keeps a tensor, formerly an int."""
    try:
        number = float(step)
        return int(number) if 0 <= number < COUNTABLE and number == int(number) else None
    except (TypeError, ValueError, OverflowError):
        return None
